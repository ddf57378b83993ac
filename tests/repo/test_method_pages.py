"""docs/methods.md: every member has a page, and what it says of compositions is what the registry does."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from docs import method_pages
from sparsejax import registry

ENTRIES = registry.available()
METHODS = [name for name, entry in ENTRIES.items() if entry.kind == "method"]


@pytest.mark.parametrize("name", ENTRIES)
def test_every_member_tells_what_its_page_needs(name):
    headings = ["Keeps", "Acts", "Costs", "Use it"]
    if name not in METHODS:
        headings.remove("Acts")
    assert list(ENTRIES[name].notes) == headings
    for text in ENTRIES[name].notes.values():
        assert text.strip().endswith(".")
    page = method_pages.page(ENTRIES[name])
    assert page.startswith(f"### `{name}`\n")
    for knob in ENTRIES[name].notes.values():
        for word in re.findall(r"`([a-z0-9_]+)(?:=\w+)?`", knob):
            assert word in ENTRIES or word in registry.method_params() or word in page.split("|", 1)[0], word


def test_the_matrix_is_what_the_registry_does():
    shown = method_pages.matrix()
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", shown, re.MULTILINE))
    found, columns = {}, []
    for line in shown.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if line.startswith("|  |"):
            columns = cells[1:]
        elif line.startswith("| `"):
            found |= {frozenset((cells[0], column)): cell for column, cell in zip(columns, cells[1:], strict=True)}
    members = [name for name, entry in ENTRIES.items() if entry.axis != "none" and name != "plain"]
    for pair in itertools.combinations(members, 2):
        if len({ENTRIES[name].axis for name in pair}) < 2:
            assert found.get(frozenset(pair), "-") == "-"
            continue
        cell = found[frozenset(pair)]
        whys = {method_pages.refusal(*pair), method_pages.refusal(*reversed(pair))}
        if cell == "yes":
            assert whys == {None}, pair
        else:
            assert reasons[cell[len("no (") : -1]] in whys, pair
    assert any(cell != "yes" for cell in found.values())


def test_numbers_come_from_the_result_file(monkeypatch, tmp_path):
    facts = {
        "family": "snapkv",
        "budget_tokens": 512,
        "spec": "snapkv(x=1)",
        "control": False,
        "acts": "prompt",
        "contexts": 3,
        "resident_bytes": 2.5e6,
        "resident_share": 0.25,
        "read_share": 0.2,
        "loss": [0.125, 0.1, 0.2],
        "kl_nats": [0.5, None, None],
        "needles": [0.75, 0.5, 1.0],
        "decode_speed": {"ratio": 2.0},
    }
    broken = {
        "family": "snapkv",
        "budget_tokens": 1024,
        "spec": "x",
        "control": False,
        "acts": "prompt",
        "invalid": "NaN",
    }
    lengths = {"64": {}, "7000": {"contexts": 4, "variants": {"snapkv 512": facts, "snapkv 1024": broken}}}
    path = tmp_path / "quality.json"
    record = {"manifest": {"model": "Some model", "dtype": "float32"}, "result": {"lengths": lengths}}
    path.write_text(json.dumps(record))
    monkeypatch.setattr(method_pages, "RESULTS", path)
    method_pages.results.cache_clear()
    about, table = method_pages.measured("snapkv")
    assert "Some model (float32), 3 contexts of 7,000 tokens" in about
    assert table.splitlines()[2:] == ["| 512 | 2.5 MB, 25% | 20% | 2.00x | - | +12.5% | 0.5 | 0.75 [0.5, 1] | - |"]
    assert method_pages.measured("quest") == []
    method_pages.results.cache_clear()
