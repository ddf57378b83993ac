"""Promises of the chains' tiers on a mock runner: host memory, disk, restarts, crashes, damage and pressure.

The numbers are those of the serving specification's list of contract tests. The mock reads back every stored row and
compares what a row has seen with its state, so tokens that are equal mean that the state was.
"""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from sparsejax.cache.chain import ChainState, Tier
from sparsejax.cache.chain_store import ChainStore, _sealed, _unsealed
from sparsejax.chain_disk import Disk
from sparsejax.chain_rows import DeviceRows
from sparsejax.engine import Engine
from sparsejax.errors import ChainCapacityError, ChainError, ChainGoneError, ConfigError, RequestError
from sparsejax.mock import METHODS, MockMethod, MockRunner
from sparsejax.request import ChainOptions, Request, SamplingParams
from sparsejax.settings import EngineSettings
from tests.contracts.chain_disk_bench import OPEN, DiskTalk, Killed, PlainArrays
from tests.contracts.test_chains import (
    NAMES,
    STATEFUL,
    STRICT,
    Talk,
    continuation,
    engine_settings,
    machines,
    operations,
    words,
)


@pytest.fixture(autouse=True)
def _close_stores():
    yield
    while OPEN:
        OPEN.pop().close()


def told(talk: DiskTalk, request_id: str) -> list[str]:
    """Status of each report that came before the first token."""
    events = talk.bench.events[request_id]
    return [e.chain.status for e in events if e.chain is not None and not e.token_ids and not e.finish_reason]


# Restarts.


@pytest.mark.parametrize("name", NAMES)
def test_p_71_a_restarted_server_goes_on(name: str, tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(41), 9, name)
    for n in range(1, 4):
        talk.settle()
        old = chain
        talk.kill()
        (chain,) = talk.index.chains.values()
        assert (chain.chain_id, chain.state, chain.tier) == (old.chain_id, ChainState.IDLE, Tier.DISK)
        assert (chain.processed, chain.ledger.tolist()) == (old.processed, old.ledger.tolist())
        assert (chain.quality, chain.turns, chain.seed) == (old.quality, old.turns, old.seed)
        assert talk.index.ids.origin(chain.chain_id) == "older"
        report, same = talk.turn([*chain.ledger.tolist(), *words(9, n)], 20, name, chain.chain_id, **STRICT)
        assert same is chain
        assert (report.status, report.prefilled_tokens, report.restored_from) == ("resumed", 10, "disk")
    talk.end()


def test_p_a_chain_of_an_earlier_boot_is_found_by_its_tokens(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(300), 9, tenant="a", salt="s")
    talk.settle()
    talk.kill()
    for options in ({"tenant": "a"}, {"tenant": "a", "salt": "t"}, {"tenant": "b", "salt": "s"}):
        report, _ = talk.turn([*chain.ledger.tolist(), 5], 5, **options)
        assert report.status == "created"
    report, _ = talk.turn([*chain.ledger.tolist(), 5], 5, tenant="a", salt="s")
    assert (report.status, report.chain_id, report.prefilled_tokens) == ("adopted", chain.chain_id, 2)
    talk.end()


def test_65_ids_of_earlier_boots_are_gone_and_not_unknown(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(30), 9)
    talk.kill()  # nothing was written
    refused = talk.send([*chain.ledger.tolist(), 3], 6, chain_id=chain.chain_id, **STRICT)
    error = talk.bench.last(refused).error
    assert isinstance(error, ChainGoneError)
    assert "restart" in error.message
    report, _ = talk.turn([*chain.ledger.tolist(), 3], 6, chain_id=chain.chain_id)
    assert (report.status, report.miss) == ("recreated", "restart")
    other = DiskTalk(tmp_path.parent / f"{tmp_path.name}-other")
    assert other.index.ids.origin(chain.chain_id) == "foreign"
    talk.end()


@pytest.mark.parametrize("steps", range(1, 12))
def test_killed_in_the_middle_of_a_turn_it_is_as_before(steps: int, tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path, prefill_buckets=((1, 16),))
    _, chain = talk.turn(words(41), 9, "window")
    talk.settle()
    before = chain.ledger.tolist()
    talk.send([*before, *words(40, 2)], 9, "window", chain.chain_id)
    for _ in range(steps):
        talk.bench.step()
        talk.worker.run()
    busy = chain.busy
    talk.kill()
    (found,) = talk.index.chains.values()
    if busy:
        assert found.ledger.tolist() == before
    talk.turn([*found.ledger.tolist(), 3], 9, "window", found.chain_id, **STRICT)
    talk.end()


def test_two_servers_never_use_one_directory(tmp_path: pathlib.Path) -> None:
    store = ChainStore(tmp_path, PlainArrays())
    with pytest.raises(ConfigError, match="in use"):
        ChainStore(tmp_path, PlainArrays())
    store.close()
    store = ChainStore(tmp_path, PlainArrays())
    assert store.ids.epoch == 1
    store.close()
    with pytest.raises(ConfigError):
        ChainStore(tmp_path / "manifest", PlainArrays())


# Crashes.


@pytest.mark.parametrize("halfway", [False, True])
@pytest.mark.parametrize("name", ["dense", "window", "heads"])
def test_78_killed_at_every_change_of_a_file(name: str, halfway: bool, tmp_path: pathlib.Path) -> None:
    """The second snapshot shares a part with the first if the method keeps all rows, and replaces it if not."""
    seen = set()
    for at in range(1, 200):
        talk = DiskTalk(tmp_path / str(at))
        _, chain = talk.turn(words(41), 9, name)
        talk.settle()
        first = chain.ledger.tolist()
        talk.turn([*first, *words(9, 1)], 20, name, chain.chain_id, **STRICT)
        second = chain.ledger.tolist()
        talk.files.kill_at, talk.files.halfway = talk.files.changes + at, halfway
        died = False
        try:
            talk.worker.run()
        except Killed:
            died = True
        talk.files.kill_at = None
        talk.kill()
        (found,) = talk.index.chains.values()
        assert found.ledger.tolist() in (first, second)
        assert not talk.disk.dropped
        seen.add(len(found.ledger))
        report, _ = talk.turn([*found.ledger.tolist(), 3], 9, name, found.chain_id, **STRICT)
        assert report.status == "resumed"
        talk.end()
        if not died:
            break
    assert at > 10
    assert seen == {len(first), len(second)}


@pytest.mark.parametrize("halfway", [False, True])
def test_78_killed_while_it_deletes_or_boots(halfway: bool, tmp_path: pathlib.Path) -> None:
    for at in range(1, 60):
        talk = DiskTalk(tmp_path / str(at))
        chains = [talk.turn(words(30, n), 9)[1] for n in range(2)]
        talk.settle()
        talk.index.drop(chains[0], "deleted")
        talk.files.kill_at, talk.files.halfway = talk.files.changes + at, halfway
        died = False
        try:
            talk.worker.run()
            talk.boot()
        except Killed:
            died = True
        talk.files.kill_at = None
        talk.kill()
        assert chains[1].chain_id in talk.index.chains
        assert len(talk.index.chains) == 1 or at == 1
        for chain in list(talk.index.chains.values()):
            talk.turn([*chain.ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
        talk.end()
        if not died:
            break
    assert at > 4


# Damage.


def damages(folder: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(kind, path) for path in files for kind in ("flip", "cut", "missing")]


def hurt(kind: str, path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if kind == "cut" else data)


@pytest.mark.parametrize("on_miss", ["serve", "error"])
def test_78_damage_costs_one_chain_and_is_told(on_miss: str, tmp_path: pathlib.Path) -> None:
    number = 0
    while True:
        talk = DiskTalk(tmp_path / str(number))
        chains = [talk.turn(words(30, n), 9, "window")[1] for n in range(2)]
        talk.settle()
        found = damages(talk.path / "chains" / chains[0].chain_id)
        if number == len(found):
            break
        hurt(*found[number])
        number += 1
        talk.kill()
        context = [*chains[0].ledger.tolist(), 3]
        request_id = talk.send(context, 6, "window", chains[0].chain_id, on_miss=on_miss)
        talk.bench.run()
        (dropped,) = talk.disk.dropped
        assert dropped[0] == chains[0].chain_id
        assert dropped[1]
        if on_miss == "serve":
            talk.check(request_id)
            report = talk.report(request_id)
            assert (report.status, report.reused_tokens) == ("recreated", 0)
            assert report.chain_id != chains[0].chain_id
            assert told(talk, request_id) == ["recreated"], "never told what did not come true"
        else:
            assert isinstance(talk.bench.last(request_id).error, ChainGoneError)
        assert chains[0].chain_id not in talk.index.chains
        talk.turn([*chains[1].ledger.tolist(), 3], 6, "window", chains[1].chain_id, **STRICT)
        talk.end()
    assert number > 15


def test_unknown_formats_and_strange_files_are_dropped_alone(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    chains = [talk.turn(words(30, n), 9)[1] for n in range(3)]
    talk.settle()
    folders = [tmp_path / "chains" / chain.chain_id for chain in chains]
    meta = _unsealed((folders[0] / "meta").read_bytes())
    (folders[0] / "meta").write_bytes(_sealed({**meta, "format": 2}))
    folders[1].rename(tmp_path / "chains" / "chain_other")
    (tmp_path / "chains" / "note.txt").write_text("hello")
    (folders[2] / "part-99-0").mkdir()
    talk.kill()
    reasons = dict(talk.disk.dropped)
    assert set(reasons) == {chains[0].chain_id, "chain_other", "note.txt"}
    assert "format 2" in reasons[chains[0].chain_id]
    assert list(talk.index.chains) == [chains[2].chain_id]
    assert not (folders[2] / "part-99-0").exists()
    (tmp_path / "manifest").write_text("{}")
    talk.kill()
    assert "manifest" in dict(talk.disk.dropped)
    assert list(talk.index.chains) == [chains[2].chain_id], "its rows are good, whoever issued its id"
    talk.end()


def test_a_disk_that_can_not_be_read_now_leaves_the_chain(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path, EngineSettings(prefix_cache=False))  # else the blocks of the second turn serve the third
    _, chain = talk.turn(words(30), 9)
    talk.settle()
    talk.kill()
    chain = talk.index.chains[chain.chain_id]
    assert talk.store is not None
    read, talk.store.read = talk.store.read, lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "input/output"))
    context = [*chain.ledger.tolist(), 3]
    refused = talk.send(context, 6, chain_id=chain.chain_id, **STRICT)
    talk.bench.run()
    assert isinstance(talk.bench.last(refused).error, ChainCapacityError)
    assert (chain.state, chain.tier) == (ChainState.IDLE, Tier.DISK)
    report, other = talk.turn(context, 6, chain_id=chain.chain_id)
    assert (report.status, other is chain, chain.state) == ("recreated", False, ChainState.IDLE)
    talk.store.read = read
    report, _ = talk.turn(context, 6, chain_id=chain.chain_id, **STRICT)
    assert (report.status, report.restored_from) == ("resumed", "disk")
    talk.end()


def test_79_chains_of_another_engine_are_listed_and_kept_until_room_is_needed(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(30), 9, "window")
    _, same = talk.turn(words(30, 2), 9, "dense")
    talk.settle()
    wider = tuple(
        MockMethod("window", window=32, interval=8) if m.name == "window" else m for m in (*METHODS, STATEFUL)
    )
    talk.boot(methods=wider)
    assert talk.disk.incompatible == {chain.chain_id: ["knobs"]}
    assert list(talk.index.chains) == [same.chain_id]
    report, _ = talk.turn([*chain.ledger.tolist(), 3], 6, "window", chain.chain_id)
    assert report.status == "recreated"
    talk.settle()
    talk.boot(script="echo")
    assert all(fields == ["weights"] for fields in [talk.disk.incompatible[same.chain_id]])
    assert talk.disk.incompatible[chain.chain_id] == ["knobs", "weights"]
    assert not talk.index.chains
    talk.boot(script="hash", methods=(*METHODS, STATEFUL))
    assert chain.chain_id in talk.index.chains, "back under the engine that made it"
    talk.budget = talk.disk.used_bytes + 140_000  # one more at a time, as far as can be told before it is written
    talk.boot(methods=wider)
    before = set(talk.disk.incompatible)
    assert chain.chain_id in before
    n = 0
    while chain.chain_id in talk.disk.incompatible:
        talk.turn(words(60, n + 5), 9, "window")
        talk.settle()
        n += 1
        assert talk.stored() <= talk.budget
    assert talk.index.counts["incompatible_deleted"] >= 1
    assert same.chain_id in talk.index.chains, "what is of no use here goes first"


def test_17_the_window_and_sampling_do_not_make_a_chain_another(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(30), 9)
    talk.settle()
    talk.boot(max_model_len=8192, num_rows=3, num_sequence_pages=500, eos_after=20)
    talk.turn([*chain.ledger.tolist(), 3], 6, None, chain.chain_id, **STRICT)
    talk.settle()
    talk.boot(page_size=8)
    assert talk.disk.incompatible == {chain.chain_id: ["geometry.page_size"]}
    talk.boot(page_size=4, max_model_len=38)
    assert talk.disk.incompatible == {chain.chain_id: ["max_model_len"]}


# Writing.


@pytest.mark.parametrize("name", NAMES)
def test_77_only_what_changed_is_copied(name: str, tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(200), 5, name)
    talk.settle()
    whole = talk.index.counts["pages_copied"]
    for n in range(1, 12):
        talk.turn([*chain.ledger.tolist(), *words(3, n)], 4, name, chain.chain_id, **STRICT)
        rows = chain.payload
        assert isinstance(rows, DeviceRows)
        assert rows.copy is not None
        talk.settle()
        assert rows.copy.visible
        assert len(rows.copy.parts) <= 8
    unchanged = talk.index.counts["pages_unchanged"]
    if name == "dense":
        assert unchanged > 9 * whole, "eleven turns, of which one copied everything again"
    if name == "stateful":
        assert not unchanged, "what is kept beside its rows goes on changing"
    assert talk.disk.used_bytes == talk.stored()
    talk.kill()
    (chain,) = talk.index.chains.values()
    talk.turn([*chain.ledger.tolist(), 9], 20, name, chain.chain_id, **STRICT)
    talk.end()


@pytest.mark.parametrize("name", ["dense", "window"])
def test_few_copies_are_under_way_at_once(name: str, tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.setattr("sparsejax.chain_tiers.LEAVING_BYTES", 1)
    talk = DiskTalk(tmp_path)
    monkeypatch.setattr(talk.bench.runner, "arrived", lambda swapped: False)
    chains = [talk.turn(words(40, n), 9, name)[1] for n in range(4)]
    talk.bench.step()
    assert [chain.payload.copy is not None for chain in chains] == [True, False, False, False]
    report, _ = talk.turn([*chains[1].ledger.tolist(), 3], 9, name, chains[1].chain_id, **STRICT)  # not copied before
    assert report.status == "resumed"
    assert talk.tiers.demote(chains[2])
    talk.index.drop(chains[3], "deleted")
    talk.bench.check()
    assert talk.tiers.unsettled
    monkeypatch.setattr(talk.bench.runner, "arrived", lambda swapped: True)
    talk.bench.step()
    talk.settle()
    assert not talk.tiers.unsettled
    assert chains[1].payload.copy.visible
    talk.kill()
    assert sorted(talk.index.chains) == sorted(chain.chain_id for chain in chains[:3])
    for chain in list(talk.index.chains.values()):
        talk.turn([*chain.ledger.tolist(), 3], 9, name, chain.chain_id, **STRICT)
    talk.end()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_refuses_never_fails_a_turn(code: int, tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(30), 9)
    talk.settle()
    first = chain.ledger.tolist()
    talk.files.error = OSError(code, os.strerror(code))
    for n in range(3):
        talk.turn([*chain.ledger.tolist(), *words(9, n)], 9, None, chain.chain_id, **STRICT)
        talk.settle()
    assert talk.index.counts["persist_failed"] == 3
    talk.files.error = None
    last = chain.ledger.tolist()
    talk.boot()
    assert talk.index.chains[chain.chain_id].ledger.tolist() == first, "as of the last snapshot that was whole"
    talk.turn([*last, 3], 9, None, chain.chain_id)
    talk.settle()
    talk.boot()
    assert talk.index.chains[chain.chain_id].ledger.tolist()[: len(last)] == last
    talk.end()


def test_a_copy_that_never_arrives_never_fails_a_turn(tmp_path: pathlib.Path, monkeypatch) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(30), 9)

    def broken(method, swapped):
        raise RuntimeError("the copy has failed")

    monkeypatch.setattr(talk.bench.runner, "pack", broken)
    talk.settle()
    assert talk.index.counts["persist_failed"] == 1
    monkeypatch.undo()
    talk.turn([*chain.ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
    talk.settle()
    talk.kill()
    talk.turn([*talk.index.chains[chain.chain_id].ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
    talk.end()


def test_what_could_not_be_deleted_does_not_come_back(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    chains = [talk.turn(words(30, n), 9)[1] for n in range(2)]
    talk.settle()
    talk.files.error = OSError(errno.EACCES, "not now")
    talk.index.drop(chains[0], "deleted")
    talk.settle()
    talk.files.error = None
    talk.turn([*chains[1].ledger.tolist(), 3], 9, None, chains[1].chain_id)
    talk.settle()
    talk.kill()
    assert list(talk.index.chains) == [chains[1].chain_id]
    talk.end()


def test_76_a_snapshot_beyond_the_budget_is_not_written(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path, budget=1000)
    _, chain = talk.turn(words(60), 9)
    talk.turn([*chain.ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
    talk.settle()
    assert talk.index.counts["not_persisted"] == 2
    assert not talk.stored()
    assert chain.tier is Tier.DEVICE
    talk.end()


@pytest.mark.parametrize("host", [0, 700, 1 << 30])
def test_host_memory_is_not_needed_to_persist(host: int, tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path, EngineSettings(chain_host_bytes=host))
    chains = [talk.turn(words(60, n), 9, "prompt")[1] for n in range(6)]
    talk.bench.check()
    assert talk.chains.host.used_bytes <= host
    talk.settle()
    assert talk.tiers.staging.used_bytes == 0, "on its way only"
    talk.kill()
    for chain in chains:
        talk.turn([*chain.ledger.tolist(), 3], 9, "prompt", chain.chain_id, **STRICT)
    talk.end()


def test_passing_requests_are_not_written(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(300), 9, implicit=True)
    talk.settle()
    assert not talk.stored()
    talk.turn([*chain.ledger.tolist(), 3], 9, implicit=True)
    talk.settle()
    assert chain.turns == 2
    assert talk.stored(), "a second turn shows that it is a conversation"
    talk.end()


# Demotion, restoring, order of loss.


def test_74_leaving_the_device_costs_nothing_once_it_was_copied(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(41), 9)
    talk.settle()
    exported = talk.bench.runner.calls["export_parked"]
    assert talk.tiers.demote(chain)
    assert chain.tier is Tier.HOST
    assert talk.bench.runner.calls["export_parked"] == exported
    talk.turn([*chain.ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
    talk.end()


def test_copies_are_made_ahead_when_pages_are_short() -> None:
    talk = Talk(EngineSettings(chain_checkpoints=0), num_sequence_pages=41)
    chains = [talk.turn(words(35, n), 6)[1] for n in range(3)]
    copied = [chain.payload.copy is not None for chain in chains if isinstance(chain.payload, DeviceRows)]
    assert copied[-1]
    assert not chains[0].payload.copy
    talk.end()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_rows_come_back_while_their_turn_waits_for_a_row(where: str, tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path, EngineSettings(prefix_cache=False), num_rows=1)  # else blocks serve it as well
    _, chain = talk.turn(words(41), 9)
    talk.settle()
    if where == "disk":
        talk.kill()
        chain = talk.index.chains[chain.chain_id]
    else:
        talk.tiers.demote(chain)
    running = talk.send(words(30, 3), 60)
    talk.bench.step(3)
    waiting = talk.send([*chain.ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
    assert told(talk, waiting) == ([] if where == "disk" else ["resumed"])
    talk.bench.step(2)
    if where == "disk":
        assert talk.worker.jobs, "it is being read"
        talk.worker.run()
        talk.bench.step()
    assert told(talk, waiting) == ["resumed"]
    assert (chain.state, chain.tier) == (ChainState.RESTORING, Tier.DEVICE)
    assert talk.bench.reason(running) is None, "the only row is another's"
    imported = talk.bench.runner.calls["import_parked"]
    talk.bench.run()
    talk.check(running, waiting)
    assert talk.bench.runner.calls["import_parked"] == imported
    talk.end()


def test_other_requests_run_while_a_chain_is_read(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(41), 9)
    talk.settle()
    talk.kill()
    waiting = talk.send([*chain.ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
    running = talk.send(words(30, 3), 20)
    while talk.bench.reason(running) is None:
        talk.bench.step()
    assert talk.worker.jobs
    assert talk.bench.tokens(waiting) == []
    talk.bench.scheduler.cancel(waiting)
    talk.bench.check()
    (chain,) = [c for c in talk.index.chains.values() if c.chain_id == chain.chain_id]
    assert (chain.state, chain.tier) == (ChainState.IDLE, Tier.DISK)
    talk.settle()
    assert chain.tier is Tier.HOST, "what was read is there"
    talk.turn([*chain.ledger.tolist(), 3], 9, None, chain.chain_id, **STRICT)
    talk.end()


@pytest.mark.parametrize("call", ["import_parked", "unpark", "setup_row"])
def test_73_a_refused_restore_leaves_the_chain_where_it_was(call: str, tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(41), 9)
    talk.settle()
    talk.kill()
    chain = talk.index.chains[chain.chain_id]
    for nth in (1, 2):
        talk.bench.runner.fail(call, nth, RequestError("refused on purpose"))
    context = [*chain.ledger.tolist(), 3]
    request_id = talk.send(context, 9, None, chain.chain_id, **STRICT)
    talk.bench.run()
    assert talk.bench.reason(request_id) == "error"
    assert chain.state is ChainState.IDLE
    talk.bench.runner._faults.clear()
    talk.turn(context, 9, None, chain.chain_id, **STRICT)
    talk.end()


def test_75_order_of_loss(tmp_path: pathlib.Path) -> None:
    """Device, host, disk, gone: each chain goes one tier at a time, the least valuable first."""
    host = 80 * 64
    settings_ = EngineSettings(chain_host_bytes=host, chain_checkpoints=0)
    talk = DiskTalk(tmp_path, settings_, num_sequence_pages=61)
    tiers: list[list[Tier | None]] = []
    chains = []
    for n in range(14):
        chains.append(talk.turn(words(40, n), 9)[1])  # 12 pages
        talk.settle()
        if not n:  # room for seven
            talk.disk.capacity_bytes = 135_000 + 6 * talk.stored()
        assert talk.chains.host.used_bytes <= host
        assert talk.stored() <= talk.disk.capacity_bytes
        tiers.append([None if c.state is ChainState.GONE else c.tier for c in chains])
    for before, after in itertools.pairwise(tiers):
        for old, new in zip(before, after, strict=False):
            if old is None:
                assert new is None
            elif new is not None:
                assert new >= old
    last = tiers[-1]
    assert last[0] is None
    assert last[-1] is Tier.DEVICE
    assert {Tier.DEVICE, Tier.HOST, Tier.DISK, None} == set(last)
    for n, chain in enumerate(chains):
        if chain.state is not ChainState.GONE:
            report, _ = talk.turn([*chain.ledger.tolist(), 3], 2, None, chain.chain_id)
            assert report.status == "resumed" or chain.state is ChainState.GONE, n
    for name in ("demoted", "moved_to_disk", "gone_evicted", "persisted"):
        assert talk.index.counts[name] > 0, name
    talk.end()


def test_ttl_takes_a_chain_from_tier_to_tier(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path, EngineSettings(chain_ttl_s=50.0, chain_disk_ttl_s=1000.0))
    _, chain = talk.turn(words(40), 6)
    talk.settle()
    times = (40.0, Tier.DEVICE), (20.0, Tier.HOST), (40.0, Tier.HOST), (20.0, Tier.DISK), (900.0, Tier.DISK)
    for seconds, tier in times:
        talk.bench.clock.sleep(seconds)
        talk.bench.step()
        assert (chain.state, chain.tier) == (ChainState.IDLE, tier)
    talk.bench.clock.sleep(200.0)
    talk.bench.step()
    assert (chain.state, chain.reason) == (ChainState.GONE, "expired")
    talk.settle()
    assert not talk.stored()
    talk.end()


def test_a_lost_turn_goes_back_to_the_snapshot(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path, EngineSettings(chain_checkpoints=0))
    talk.bench.runner.poison(251)
    _, chain = talk.turn(words(30), 6)
    talk.settle()
    before = chain.ledger.tolist(), chain.processed
    for _ in range(2):
        request_id = talk.send([*before[0], 251], 6, chain_id=chain.chain_id)
        talk.bench.run()
        assert talk.bench.reason(request_id) == "error"
        assert (chain.ledger.tolist(), chain.processed, chain.state) == (*before, ChainState.IDLE)
    talk.turn([*before[0], 5], 6, chain_id=chain.chain_id, **STRICT)
    talk.end()


def test_a_fork_of_a_chain_on_disk_goes_its_own_way(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(300), 9, "window")
    talk.turn([*chain.ledger.tolist(), 3], 9, "window", chain.chain_id)
    talk.settle()
    talk.kill()
    chain = talk.index.chains[chain.chain_id]
    context = chain.ledger.tolist()
    ids = [talk.send([*context, n], 9, "window") for n in range(3)]
    ids.append(talk.send([*context, 9], 9, "window", chain.chain_id, **STRICT))
    talk.bench.run()
    talk.check(*ids)
    assert [talk.report(i).status for i in ids] == ["forked"] * 3 + ["resumed"]
    assert len({talk.report(i).chain_id for i in ids}) == 4
    talk.settle()
    talk.kill()
    assert len(talk.index.chains) == 4
    for found in list(talk.index.chains.values()):
        talk.turn([*found.ledger.tolist(), 3], 9, "window", found.chain_id, **STRICT)
    talk.end()


def test_deleted_with_a_fork_that_was_never_read(tmp_path: pathlib.Path) -> None:
    talk = DiskTalk(tmp_path)
    _, chain = talk.turn(words(300), 9)
    talk.turn([*chain.ledger.tolist(), 3], 9, None, chain.chain_id)
    talk.settle()
    talk.kill()
    chain = talk.index.chains[chain.chain_id]
    context = [*chain.ledger.tolist(), 7]
    request_id = talk.send(context, 9)
    assert len(talk.index.chains) == 2
    talk.index.drop(chain, "deleted")
    talk.bench.run()
    talk.check(request_id)
    assert talk.report(request_id).status == "recreated"
    talk.end()


# A real thread.


def test_an_engine_that_is_closed_has_written_everything(tmp_path: pathlib.Path) -> None:
    runner = MockRunner()
    context = words(40)
    chain_id: str | None = None
    for turn in range(3):
        store = ChainStore(tmp_path, PlainArrays())
        with Engine(runner, disk=Disk(store, runner, 1 << 30)) as engine:
            done = threading.Event()
            events: list = []

            def on_event(event, events=events, done=done):
                events.append(event)
                if event.finish_reason:
                    done.set()

            options = ChainOptions(chain_id, on_miss="error")
            params = SamplingParams(max_tokens=8)
            engine.submit(Request(f"t{turn}", tuple(context), params, "window", chain=options), on_event)
            assert done.wait(10)
        assert events[-1].finish_reason == "length", events[-1].error
        assert events[0].chain.status == ("resumed" if turn else "created")
        chain_id = events[-1].chain.chain_id
        context = [*context, *(t for e in events for t in e.token_ids), *words(5, turn)]
        runner = MockRunner()


# Random programs.

talks = st.tuples(  # whole turns
    st.just("talk"),
    st.integers(0, 8),  # which chain
    st.sampled_from(["", "", "", "append", "unnamed", "new"]),
    st.integers(1, 12),  # new tokens
    st.integers(1, 9),  # max_tokens
    st.sampled_from(["dense", "dense", *NAMES]),
    st.sampled_from([0, 1, None]),  # jobs done behind it
)
more = st.one_of(
    operations,
    operations,
    operations,
    talks,
    talks,
    talks,
    st.tuples(st.just("work"), st.sampled_from([1, 2, None])),
    st.tuples(st.just("kill")),
    st.tuples(st.just("settle")),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("hurt"), st.integers(0, 99)),
    st.tuples(st.just("demote"), st.integers(0, 9)),
)


@settings(
    max_examples=int(os.environ.get("SPARSEJAX_PROGRAMS", "120")),
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(
    engine_settings,
    machines,
    st.sampled_from([0, 400_000, 1 << 30]),
    st.booleans(),
    st.lists(more, min_size=12, max_size=40),
)
def test_random_programs_with_a_disk(
    tmp_path_factory, settings_: EngineSettings, machine: dict, budget: int, slow: bool, program: list[tuple]
) -> None:
    talk = DiskTalk(tmp_path_factory.mktemp("chains"), settings_, budget, slow, **machine)
    sent: dict[str, tuple[list[int], int]] = {}
    contexts: dict[str, tuple[list[int], str]] = {}  # of chains that boots have known

    def verify() -> None:
        bench = talk.bench
        for request_id, (context, max_tokens) in sent.items():
            tokens, reason = bench.tokens(request_id), bench.reason(request_id)
            expected = bench.runner.generate(context, max_tokens, bench.requests[request_id].params.seed)
            assert tokens == expected[: len(tokens)], "other tokens than alone"
            if reason == "length":
                assert tokens == expected
            if reason == "error":
                error = bench.last(request_id).error
                assert isinstance(error, RequestError), error
                assert isinstance(error, ChainError) or settings_.swap_bytes < 1 << 30, error

    for operation, *args in program:
        live = list(talk.index.chains.values())
        bench = talk.bench
        if operation in ("turn", "talk"):
            which, twist, new, max_tokens, name = args[:5]
            history, chain_id, options = [], None, {}
            if live and twist != "new":
                history, chain_id, name, options = continuation(live, which, twist)
            elif contexts and which == 9:  # of an earlier boot, dead or alive
                chain_id = sorted(contexts)[new % len(contexts)]
                history, name = contexts[chain_id]
            fresh = words(new, len(sent))
            ids = fresh if twist == "append" and history else [*history, *fresh]
            if len(history) + new > 160:
                continue
            try:
                request_id = talk.send(ids, max_tokens, name, chain_id, **options)
            except RequestError:
                continue
            sent[request_id] = [*history, *fresh], max_tokens
            if operation == "talk":
                bench.run()
                talk.worker.run(args[5])
        elif operation == "advance":
            bench.step(args[0])
        elif operation == "wait":
            bench.clock.sleep(args[0])
        elif operation == "preempt":
            running = bench.scheduler.running
            if running:
                bench.scheduler._preempt(running[args[0] % len(running)])
        elif operation == "reclaim":
            talk.chains.reclaim()
        elif operation == "demote":
            idle = [c for c in live if not c.busy and isinstance(c.payload, DeviceRows)]
            if idle:
                talk.tiers.demote(idle[args[0] % len(idle)])
        elif operation == "drop":
            idle = [chain for chain in live if not chain.busy]
            if idle:
                talk.index.drop(idle[args[0] % len(idle)], "deleted")
        elif operation == "work":
            talk.worker.run(args[0])
        elif operation == "settle":
            bench.run()
            talk.settle()
            assert talk.disk.used_bytes <= budget
        elif operation == "refuse":
            talk.files.error = OSError(errno.ENOSPC, "full") if args[0] else None
        elif operation == "hurt":
            files = sorted(p for p in (talk.path / "chains").rglob("*") if p.is_file())
            if files:
                hurt("flip", files[args[0] % len(files)])
        elif operation == "kill":
            contexts |= {c.chain_id: (c.ledger.tolist(), c.method) for c in live}
            verify()
            sent.clear()
            talk.files.error = None
            talk.kill()
        elif sent:
            request_id = list(sent)[args[0] % len(sent)]
            if operation == "cancel":
                bench.scheduler.cancel(request_id)
            else:
                bench.scheduler.stop(request_id, 0, args[1])
        talk.bench.check()
        assert talk.disk.used_bytes + talk.disk.reserved_bytes <= max(budget, talk.disk.used_bytes)
        assert talk.chains.host.used_bytes <= settings_.chain_host_bytes
    talk.files.error = None
    talk.bench.run()
    talk.bench.check()
    verify()
    for chain in talk.index.chains.values():
        assert chain.state is ChainState.IDLE
    talk.settle()
    talk.bench.check_all_free()
    talk.settle()
    assert not talk.tiers.staging.used_bytes
    assert not talk.disk.used_bytes or talk.disk.incompatible
