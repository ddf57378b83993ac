"""Chains that come back from disk in a new runner go on, bit for bit, as those that stayed; servers that are killed."""

from __future__ import annotations

import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sparsejax import identity
from sparsejax.array_files import OrbaxFiles
from sparsejax.cache.chain import Tier
from sparsejax.cache.chain_store import ChainStore, CorruptError, NewPart, Record
from sparsejax.chain_disk import Disk
from sparsejax.chain_rows import DeviceRows
from sparsejax.mock import MockRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from tests.contracts.compositions import METHODS, RAGGED
from tests.core.harness import TINY, tiny_weights
from tests.core.test_chains import PROMPT, SUFFIXES, Conversation, runner_of

QUICK = ("dense", "h2o", RAGGED[-1])


class Lasting(Conversation):
    """A conversation whose server may be replaced by another one."""

    def __init__(self, name: str, path: pathlib.Path, programs: dict) -> None:
        self.name, self.path, self.programs = name, path, programs
        self.store: ChainStore | None = None
        super().__init__(runner_of(name))
        self.restart()

    def restart(self) -> None:
        if self.store is not None:
            self.scheduler.chains.close()
            self.runner = runner_of(self.name)
        self.runner._programs = self.programs  # they are pure, and take longest to make
        self.store = ChainStore(self.path, OrbaxFiles())
        disk = Disk(self.store, self.runner, 1 << 30)
        self.scheduler = Scheduler(self.runner, EngineSettings(), disk=disk)


def rows_of(talk: Conversation) -> dict[str, np.ndarray]:
    """Every stored row and statistic of a chain on the device; what lies behind the last row of a page is 0."""
    rows, geometry = talk.chain.payload, talk.runner.limits.geometry
    assert isinstance(rows, DeviceRows)
    pages, span = rows.pages, geometry.head_pages_per_page(rows.pages.granularity)
    arrays = talk.runner.pack(rows.method, talk.runner.export_parked(rows.method, pages.padded(-1), rows.parked))
    first = np.arange(int(pages.columns.max())) * pages.page_size
    left = (pages.lengths[..., None] - first)[first < pages.lengths[..., None]]
    valid = np.repeat(np.arange(pages.page_size) < left[:, None], span, 0)
    # Of rows that were decoded since the last prompt some methods have no scores yet.
    scored = int(arrays["row_aux.accumulated_rows"].min()) if "row_aux.accumulated_rows" in arrays else None
    place = np.broadcast_to(first, (*pages.columns.shape, len(first)))[first < pages.lengths[..., None]]
    known = valid & (np.repeat(np.arange(pages.page_size) + place[:, None], span, 0) < (scored or 1 << 30))
    found = {}
    for name, array in arrays.items():
        per_row = name.startswith(("pools", "page_aux")) and array.shape[1:2] == (pages.page_size,)
        rows_in = known if name == "page_aux.accumulated_scores" else valid
        mask = rows_in.reshape(*valid.shape, *[1] * (array.ndim - 2)) if per_row else True
        found[name] = np.where(mask, array, 0)
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_71_from_disk_in_a_new_runner_it_goes_on_bit_for_bit(name: str, tmp_path: pathlib.Path) -> None:
    stayed = Conversation(runner_of(name))
    lasting = Lasting(name, tmp_path, stayed.runner._programs)
    # What such a method keeps beside appended rows, which it never reads.
    anything = stayed.runner.limits.methods[name].replays_prompts
    for n, tokens in enumerate([PROMPT, *SUFFIXES]):
        assert lasting.turn(tokens) == stayed.turn(tokens), f"turn {n + 1}"
        mine, theirs = rows_of(lasting), rows_of(stayed)
        assert mine.keys() == theirs.keys()
        for key, array in theirs.items():
            if anything and n and key.startswith("page_aux"):
                continue
            assert mine[key].tobytes() == array.tobytes(), (n, key)
        assert lasting.chain.quality == stayed.chain.quality
        lasting.restart()
        assert (lasting.chain.tier, lasting.chain.processed) == (Tier.DISK, stayed.chain.processed)
        assert not lasting.scheduler.chains.tiers.disk.dropped
    lasting.scheduler.chains.close()


def test_weights_are_told_apart_by_every_bit() -> None:
    weights = tiny_weights(TINY)
    digest = identity.weights_digest(weights)
    assert identity.weights_digest(tiny_weights(TINY)) == digest
    changed = dict(weights)
    name = next(iter(changed))
    changed[name] = weights[name].at[(0,) * weights[name].ndim].add(1e-3)
    assert identity.weights_digest(changed) != digest
    flipped = {**weights, name: weights[name].reshape(-1)[::-1].reshape(weights[name].shape)}
    assert identity.weights_digest(flipped) != digest


@pytest.mark.parametrize("kind", ["flip", "cut", "missing"])
def test_78_no_damage_to_a_checkpoint_goes_unnoticed(kind: str, tmp_path: pathlib.Path) -> None:
    store = ChainStore(tmp_path, OrbaxFiles())
    draw, one = np.random.default_rng(0), np.ones((1, 1), np.int32)
    arrays = {
        "pools.k": draw.integers(0, 99, (3, 4, 2), np.uint16),
        "none": np.zeros((0, 2)),
        "request": np.float32(3.5),
    }
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    record = Record("chain_a", b"s", b"f", {}, "dense", "", np.arange(9, dtype=np.uint32), 8, 1, one)
    (part,) = store.write(record, [NewPart(0 * one, one, arrays, 1)], 1 << 20).parts
    folder, noticed = tmp_path / "chains" / "chain_a" / part.name, 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        damaged = bytearray(data if kind == "flip" else data[:-1])
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
        if kind == "missing":
            path.unlink()
        try:
            found = store.read("chain_a", part)
        except CorruptError:
            noticed += 1
        else:  # of what nobody needs
            assert kind == "flip"
            assert all(found[name].tobytes() == array.tobytes() for name, array in arrays.items())
        path.write_bytes(data)
    assert noticed > 2
    found = store.read("chain_a", part)
    assert {name: (a.dtype, a.shape) for name, a in found.items()} == {n: (a.dtype, a.shape) for n, a in arrays.items()}
    store.close()


SERVER = """
import sys
from sparsejax.array_files import OrbaxFiles
from sparsejax.cache.chain_store import ChainStore
from sparsejax.chain_disk import Disk
from sparsejax.mock import MockRunner
from sparsejax.request import ChainOptions, Request, SamplingParams
from sparsejax.scheduler import Scheduler

runner = MockRunner()
scheduler = Scheduler(runner, disk=Disk(ChainStore(sys.argv[1], OrbaxFiles()), runner, 1 << 30))
chains = list(scheduler.chains.index.chains.values())
for turn in range(1000):
    chain = chains[0] if chains else None
    context = [*(chain.ledger.tolist() if chain else [1, 2, 3]), turn % 250, 7]
    if len(context) > 3000:
        break
    options = ChainOptions(chain.chain_id if chain else None, on_miss="error")
    events = []
    request = Request(f"t{turn}", tuple(context), SamplingParams(max_tokens=9), sys.argv[2], chain=options)
    scheduler.add(scheduler.prepare(request, events.append))
    while scheduler.step():
        pass
    assert events[-1].finish_reason == "length", events[-1].error
    chains = list(scheduler.chains.index.chains.values())
    print(len(chains[0].ledger), scheduler.chains.index.counts["persisted"], flush=True)
"""


@pytest.mark.parametrize("method", ["dense", "window"])
def test_78_killed_for_good_it_goes_on_where_the_last_snapshot_was(method: str, tmp_path: pathlib.Path) -> None:
    draw = random.Random(method)
    lengths = [0]
    for _ in range(3):
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path), method],
            stdout=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path.cwd(),
        )
        assert server.stdout is not None
        said = []
        while len(said) < 3 or said[-1][1] < 2:  # some were written
            line = server.stdout.readline()
            assert line, "the server has ended by itself"
            said.append([int(word) for word in line.split()])
        time.sleep(draw.random() * 0.3)
        server.send_signal(signal.SIGKILL)
        said += [[int(word) for word in line.split()] for line in server.stdout if line.endswith("\n")]
        server.stdout.close()
        server.wait()
        store = ChainStore(tmp_path, OrbaxFiles())
        assert not store.dropped
        (snapshot,) = store.found
        length = len(snapshot.record.ledger)
        assert lengths[-1] < length
        assert length in [words[0] for words in said] or length == said[-1][0] + 11, "one that was reached"
        lengths.append(length)
        for part in snapshot.parts:
            store.read(snapshot.record.chain_id, part)
        store.close()
    runner = MockRunner()
    store = ChainStore(tmp_path, OrbaxFiles())
    scheduler = Scheduler(runner, disk=Disk(store, runner, 1 << 30))
    assert [chain.tier for chain in scheduler.chains.index.chains.values()] == [Tier.DISK]
    scheduler.chains.close()
