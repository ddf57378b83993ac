"""Pictures of what survives: their conversation, their numbers, and the files themselves."""

from __future__ import annotations

import base64
import re
import struct
import xml.etree.ElementTree as ET
import zlib

import numpy as np
import pytest

from benchmarks import common, raster, retention_map
from benchmarks.retention_map import Map, Turn
from sparsejax import registry
from sparsejax.models.load import load_model
from tests.benchmarks.test_smoke import run


def encode(text: str) -> list[int]:
    """One id per byte."""
    return list(text.encode())


def test_a_conversation_has_the_length_that_was_asked_for():
    turns = retention_map.conversation(encode, 4096, 160, start=[0])
    assert sum(len(turn.ids) for turn in turns) == 4096
    assert len(turns[-1].ids) == 160
    assert turns[0].ids[0] == 0
    assert [turn.speaker for turn in turns] == ["User", "Assistant", "User", "Tool", "Assistant", "User", "Assistant"]
    shown = bytes(token for turn in turns[1:] for token in turn.ids).decode(errors="replace")
    assert shown.startswith("Assistant: Thank you.")
    assert shown.count('"pages": [') == shown.count('"]}') == 1
    # The answer goes on where the last question's prose ends.
    last = bytes(turns[-2].ids)[-42:-2] + bytes(turns[-1].ids)[len("Assistant: ") :]
    assert last.decode() in common.prose()
    with pytest.raises(ValueError, match="no room"):
        retention_map.conversation(encode, 300, 160)


def test_numbers_of_a_map_made_by_hand():
    """Two layers of two heads over ten tokens; the first layer's heads agree, the second's do not."""
    rows = [[[0, 1, 4, 8, 9], [0, 1, 4, 8, 9]], [[0, 1, 2, 8, 9], [0, 1, 3, 9]]]
    found = Map("x", [[np.asarray(head, np.int32) for head in layer] for layer in rows])
    turns = [Turn("User", (1,) * 4), Turn("Assistant", (1,) * 6)]
    numbers = retention_map.facts(found, turns)
    assert numbers["heads_differ"]
    assert [len(layer) for layer in found.lines()] == [2, 2]
    assert numbers["rows_by_layer"] == [5.0, 4.5]
    assert numbers["rows"] == {"mean": 4.75, "least": 4.5, "most": 5.0}
    assert (numbers["first_kept_everywhere"], numbers["last_kept_everywhere"]) == (2, 1)
    assert numbers["kept_everywhere"] == 3
    assert numbers["kept_nowhere"] == 3
    assert numbers["overlap_of_neighbouring_layers"] == pytest.approx(4 / 6)
    assert numbers["turns"][0] == {"speaker": "User", "kept": pytest.approx((2 + 2 + 3 + 3) / 16)}
    same = Map("x", [[head, head] for head, _ in found.positions])
    assert [len(layer) for layer in same.lines()] == [1, 1]
    assert not retention_map.facts(same, turns)["heads_differ"]


def picture_of(shown: str) -> np.ndarray:
    """Palette indices of the embedded picture, as any PNG reader finds them."""
    data = base64.b64decode(re.search(r"base64,([^\"]+)", shown)[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + size
    width, height, depth, colours = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colours) == (8, 3)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def test_pixels_are_shares_of_neighbouring_rows():
    values = np.zeros((2, 10), np.float32)
    values[0, [0, 1, 2, 3, 4, 5, 9]] = 1
    shown = raster.svg(
        "a < b",
        "c",
        values,
        lines_per_row=1,
        borders=[(0, 6, "user"), (6, 10, "tool")],
        spans=[(0, 6, "first 6")],
        bars=[7, 0],
        x_label="x",
        y_label="y",
        bar_label="rows",
        columns=3,
    )
    texts = [node.text for node in ET.fromstring(shown).iter() if node.tag.endswith("text")]
    assert {"a < b", "user", "tool", "first 6", "of 4: none", "all kept"} <= set(texts)
    assert (picture_of(shown) == [[16, 8, 8], [0, 0, 0]]).all()


def test_pictures_of_whole_conversations_are_small():
    """The worst there is: every head of every layer keeps rows by lot."""
    rng = np.random.default_rng(0)
    positions = [[np.sort(rng.choice(4096, 512, replace=False)) for _ in range(3)] for _ in range(30)]
    found = Map("x", positions)
    turns = [Turn("User", (1,) * 4000), Turn("Assistant", (1,) * 96)]
    shown = retention_map.svg("x", found, retention_map.facts(found, turns), turns, "model")
    assert len(shown) < 150_000
    assert picture_of(shown).shape == (90, 1024)


def test_what_is_drawn_is_what_the_registry_finds():
    found = retention_map.evicting()
    assert {"snapkv", "streamingllm"} <= set(found)
    entries = registry.available()
    assert all(entries[name].build(entries[name].params_type()).evicts for name in found)
    assert "quest" not in found


@pytest.mark.parametrize(
    ("composition", "name"),
    [("snapkv", "snapkv"), ("snapkv(a=1,b=x)+fp8_kv", "snapkv_fp8_kv"), (" quest (c=2) + plain", "quest_plain")],
)
def test_files_are_named_by_members(composition, name):
    assert retention_map.file_name(composition) == name


def test_survivors_are_the_rows_of_the_cache():
    """A method whose choice is known beforehand, with a prompt in chunks and evictions while decoding."""
    model = load_model("tiny-llama", load_format="dummy", dtype="float32")
    composition = "streamingllm(sink_keep_tokens=5,recent_keep_tokens=20,streamingllm_decode_trigger_ratio=1.2)"
    turns = [Turn("User", tuple(range(1, 101))), Turn("Assistant", tuple(range(1, 13)))]
    found = retention_map.survivors(model, composition, turns, 32)
    # 25 rows after the prompt, 30 once five tokens are decoded: cut to 25, twice; two more are decoded.
    expected = [*range(5), *range(90, 112)]
    assert all(head.tolist() == expected for layer in found.positions for head in layer)


@pytest.mark.slow
def test_command(tmp_path):
    found = run("retention_map", tmp_path, "--quick", "--plot", tmp_path)
    assert list(found) == retention_map.evicting()
    for name, numbers in found.items():
        assert (tmp_path / f"retention_{name}.svg").read_text().startswith("<svg")
        assert 0 < numbers["rows"]["least"] <= numbers["rows"]["most"] <= numbers["tokens"] == 640
