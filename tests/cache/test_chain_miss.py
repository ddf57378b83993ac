"""Why a turn reuses nothing, or less than it could: the word, the token, and what finding it costs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from sparsejax.cache.chain import ChainIds, Checkpoint, seed_of
from sparsejax.cache.chain_index import ChainIndex, Turn
from sparsejax.errors import (
    ChainBusyError,
    ChainFingerprintError,
    ChainGoneError,
    ChainMismatchError,
    ChainNotFoundError,
)

RNG = np.random.default_rng(0)


def words(n: int) -> np.ndarray:
    return RNG.integers(0, 150_000, n).astype(np.uint32)


def turn(ids: np.ndarray, print_: bytes = b"f", method: str = "m", salt: str = "", **fields: Any) -> Turn:
    tenant = fields.get("tenant", "")
    return Turn(ids, seed_of(print_, salt, tenant), print_, method, **fields)


def keep(index: ChainIndex, ids: np.ndarray, **fields: Any) -> Any:
    """A finished turn over these tokens."""
    chain = index.apply(index.plan(turn(ids, lookup=False, **fields)), "owner")
    index.start(chain, "owner", ids)
    index.finish(chain, "owner", ids, len(ids) - 1, object())
    return chain


def test_nothing_alike_is_cold() -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    ids = words(600)
    keep(index, ids)
    plan = index.plan(turn(words(600)))
    assert (plan.status, plan.miss, plan.diverged_at) == ("created", "cold", None)
    few = np.concatenate([ids[:31], words(600)])
    assert index.plan(turn(few)).miss == "cold", "a few tokens in common mean nothing"
    assert index.plan(turn(ids, lookup=False)).miss == "cold", "nothing was looked for"


@pytest.mark.parametrize("at", [32, 100, 255, 256, 257, 511, 512, 599])
def test_a_divergence_is_found_to_the_token(at: int) -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    ids = words(601)
    chain = keep(index, ids)
    for _ in range(3):
        keep(index, np.concatenate([ids[: at // 2], words(300)]))  # others have less in common
    sent = ids.copy()
    sent[at] += 1
    plan = index.plan(turn(sent))
    assert (plan.status, plan.miss, plan.diverged_at) == ("created", "diverged", at)
    assert chain.chain_id in (plan.reason or "")
    named = index.plan(turn(sent, chain_id=chain.chain_id))
    assert (named.status, named.miss, named.diverged_at) == ("recreated", "diverged", at)
    with pytest.raises(ChainMismatchError) as caught:
        index.plan(turn(sent, chain_id=chain.chain_id, on_miss="error"))
    assert (caught.value.reason, caught.value.token) == ("diverged", at)


@pytest.mark.parametrize("tokens", [100, 256, 599])
def test_a_prompt_that_ends_inside_a_chain_has_not_diverged(tokens: int) -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    ids = words(600)
    chain = keep(index, ids)
    plan = index.plan(turn(ids[:tokens]))
    assert (plan.status, plan.miss, plan.diverged_at) == ("created", "short", None)
    assert chain.chain_id in (plan.reason or "")
    index.add_checkpoint(chain, Checkpoint("prompt_end", 50, object()))
    plan = index.plan(turn(ids[:tokens]))
    assert (plan.status, plan.reused, plan.miss, plan.diverged_at) == ("forked", 50, "short", None)


def test_what_tells_chains_apart_is_named() -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    ids = words(600)
    chain = keep(index, ids)
    more = np.concatenate([ids, words(5)])
    others: list[tuple[dict[str, Any], str]] = [
        ({"salt": "s"}, "salt"),
        ({"print_": b"g", "method": "n"}, "method"),
        ({"print_": b"g"}, "fingerprint"),
    ]
    for fields, word in others:
        assert index.plan(turn(more, **fields)).miss == word
        assert index.plan(turn(more, chain_id=chain.chain_id, **fields)).miss == word
        with pytest.raises(ChainFingerprintError) as caught:
            index.plan(turn(more, chain_id=chain.chain_id, on_miss="error", **fields))
        assert caught.value.reason == word
    assert index.plan(turn(more, tenant="another")).miss == "cold", "others' chains say nothing"


def test_an_id_of_another_tenant_is_like_one_that_nobody_issued() -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    chain, gone = keep(index, words(600), tenant="a"), keep(index, words(600), tenant="a")
    index.drop(gone, "evicted")
    said = set()
    for name in (chain.chain_id, gone.chain_id, "chain_nobody"):
        with pytest.raises(ChainNotFoundError) as caught:
            index.find(name, "b")
        said.add(caught.value.message.replace(name, "..."))
    assert len(said) == 1
    with pytest.raises(ChainGoneError):
        index.find(gone.chain_id, "a")


def test_a_chain_of_an_earlier_boot_says_how_it_ended() -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    chain, never = keep(index, words(600)), index.ids.mint()
    index.ids.epoch += 1
    index.drop(chain, "deleted")
    for name, reason in ((chain.chain_id, "deleted"), (never, "restart")):
        with pytest.raises(ChainGoneError) as caught:
            index.find(name)
        assert caught.value.reason == reason


def test_the_end_of_a_chain_is_remembered() -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic, max_tombstones=2)
    ids = words(600)
    chain = keep(index, ids)
    index.drop(chain, "evicted")
    more = np.concatenate([ids, words(5)])
    assert index.plan(turn(more)).miss == "evicted"
    assert index.plan(turn(more, chain_id=chain.chain_id)).miss == "evicted"
    with pytest.raises(ChainGoneError) as caught:
        index.plan(turn(more, chain_id=chain.chain_id, on_miss="error"))
    assert caught.value.reason == "evicted"
    assert index.plan(turn(more, salt="s")).miss == "cold"
    for _ in range(2):
        index.drop(keep(index, words(600)), "expired")
    assert index.plan(turn(more)).miss == "cold", "only so many are remembered"


def test_going_on_from_an_earlier_state_says_what_was_left_out() -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    ids = words(600)
    chain = keep(index, ids)
    index.add_checkpoint(chain, Checkpoint("prompt_end", 300, object()))
    sent = ids.copy()
    sent[400] += 1
    plan = index.plan(turn(sent))
    assert (plan.status, plan.reused, plan.miss, plan.diverged_at) == ("forked", 300, "diverged", 400)
    assert index.plan(turn(np.concatenate([ids, words(3)]))).miss is None


def test_the_end_of_an_idle_chain_can_be_cut_off() -> None:
    released: list[Any] = []
    index = ChainIndex(ChainIds(b"x"), released.append, time.monotonic)
    ids = words(700)
    chain = keep(index, ids)
    head, early, late = chain.payload, object(), object()
    index.add_checkpoint(chain, Checkpoint("prompt_end", 300, early))
    index.add_checkpoint(chain, Checkpoint("turn_end", 600, late))
    assert not index.cut(chain, 299)
    assert (len(chain.ledger), chain.processed, released) == (700, 699, [])
    assert index.cut(chain, 520)
    assert (chain.ledger.tolist(), chain.processed, chain.payload) == (ids[:520].tolist(), 300, early)
    assert released == [head, late]
    index.check_integrity(deep=True)
    sent = np.concatenate([ids[:520], words(9)])
    plan = index.plan(turn(sent))
    assert (plan.status, plan.source, plan.reused) == ("adopted", chain, 300)
    index.apply(plan, "owner")
    with pytest.raises(ChainBusyError):
        index.cut(chain, 400)


def test_a_new_prompt_of_128k_costs_little() -> None:
    index = ChainIndex(ChainIds(b"x"), lambda payload: None, time.monotonic)
    shared = words(2048)
    for _ in range(200):
        keep(index, np.concatenate([shared, words(4096)]))
    spent = []
    for _ in range(10):
        ids = np.concatenate([shared, words(128 * 1024 - 2048)])
        began = time.perf_counter()
        plan = index.plan(turn(ids))
        chain = index.apply(plan, "owner")
        index.start(chain, "owner", ids)
        index.finish(chain, "owner", np.concatenate([ids, words(100)]), len(ids) + 99, object())
        spent.append(time.perf_counter() - began)
        assert (plan.miss, plan.diverged_at) == ("diverged", 2048)
        index.check_integrity(deep=True)
    assert min(spent) < 5e-3, f"{1e3 * min(spent):.2f} ms"
