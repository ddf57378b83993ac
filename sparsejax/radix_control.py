"""What can be asked of the prefix cache from outside: what it has of some tokens, and to keep or give up that.

For `Engine.consult`, but for `routed`, which any thread may call. Selectors are token ids; a client finds, keeps and
deletes only what its own tenant and salt have.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from sparsejax.cache.radix_tree import Block, Cut, Scope
from sparsejax.caches import Caches
from sparsejax.errors import PrefixDisabledError, RequestError
from sparsejax.radix_reports import BlockInfo, Deleted, Pinned, PrefixMatch, PrefixPath, Retained
from sparsejax.request import PrefixOptions

MAX_PIN_S = 86_400.0
MAX_RETENTION = 1000
MAX_LISTED_BLOCKS = 8192
MAX_SUBTREE_BLOCKS = 16_384
"""So many blocks of a subtree are counted, for the sake of the steps that wait meanwhile."""
_ROUTING_TRIES = 3


def match(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray) -> PrefixMatch:
    """What a request would begin with. Changes nothing; counts for nothing in statistics and worth."""
    refused = _refused(caches, method, len(ids))
    if refused is not None:
        return refused
    index = caches.radix.index
    found = index.match(_scope(caches, method, options), ids, exact=options.exact)
    why = found.miss
    miss = None if why is None else {"reason": why.reason, "message": why.text, "token": why.token}
    degraded = found.missing > 0 or found.tainted > 0
    blocks, resident = found.blocks, len(found.pages)
    last = blocks[-1] if blocks else None
    matched = _matched(caches, method, options, len(ids), last, resident, degraded, miss)
    return dataclasses.replace(matched, host_tokens=len(caches.radix.hosted(found, ids)) * index.block_tokens)


def routed(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray) -> PrefixMatch:
    """`match` without waiting for the engine, and without saying why less was found. Any thread may call it.

    It reads what the engine's thread may be changing: each block was there when it was read, and if the cache changes
    all the time the numbers of several moments may be mixed. Good enough for choosing a server.
    """
    refused = _refused(caches, method, len(ids), snapshot=True)
    if refused is not None:
        return refused
    index, scope = caches.radix.index, _scope(caches, method, options)
    usable = max(0, len(ids) - 1) // index.block_tokens * index.block_tokens
    last, pages, degraded = None, 0, False
    for _ in range(_ROUTING_TRIES):
        version, path = index.changes, index.longest(scope, ids[:usable])
        if options.exact:
            path = list(itertools.takewhile(lambda b: b.cut is None and not b.tainted and b.pages is not None, path))
        last = node = next((block for block in reversed(path) if block.pages is not None), None)
        pages, degraded = 0, last is not None and any(block.tainted for block in path[: last.depth])
        while node is not None and node.parent is not None:
            pages, degraded, node = pages + len(node.pages or ()), degraded or node.cut is not None, node.base
        if index.changes == version:
            break
    return dataclasses.replace(_matched(caches, method, options, len(ids), last, pages, degraded, None), snapshot=True)


def inspect(
    caches: Caches,
    method: str,
    options: PrefixOptions,
    ids: np.ndarray,
    *,
    offset: int = 0,
    limit: int = 1024,
    subtree: bool = False,
) -> PrefixPath:
    """The path of some tokens, block by block.

    Args:
      offset, limit: of the blocks that are described.
      subtree: count what follows the last block too.
    """
    refused = _refused(caches, method, len(ids))
    index = caches.radix.index
    size = index.block_tokens
    if refused is not None:
        return PrefixPath(False, False, method, size, reason=refused.reason)
    index.expire_pins()
    wanted = len(ids) // size
    path = index.longest(_scope(caches, method, options), ids)
    if not path:
        reason = "prefix_shorter_than_block_size" if not wanted else "not_found"
        return PrefixPath(False, True, method, size, wanted, offset=offset, reason=reason)
    rows, cuts = _rows_of(path)
    now, infos, behind = caches.chains.now_s, [], 0
    for number in range(offset, min(len(path), offset + limit)):
        block = path[number]
        while behind < len(cuts) and cuts[behind].start < block.depth * size:
            behind += 1
        cut = cuts[behind - 1] if behind else None
        infos.append(
            BlockInfo(
                block_id=block.digest.hex(),
                logical_block_idx=number,
                logical_tokens=size,
                resident_kv_tokens=rows.get(number, 0) * size,
                ref_count=block.refs,
                pin_count=block.pins,
                retention=block.retention,
                eviction_priority=-block.retention,
                child_count=len(block.children),
                device_present=block.pages is not None,
                hits=block.hits,
                idle_s=max(0.0, now - block.used_s),
                quality_degraded=block.tainted or cut is not None or block.pages is None,
                prune=None if cut is None else _record(cut),
            )
        )
    return PrefixPath(
        matched=True,
        enabled=True,
        method=method,
        block_size=size,
        selector_block_count=wanted,
        hit_block_count=len(path),
        hit_len=len(path) * size,
        resident_kv_tokens=sum(rows.values()) * size,
        last_block_id=path[-1].digest.hex(),
        offset=offset,
        path_blocks=tuple(infos),
        truncated=offset > 0 or len(infos) < len(path),
        subtree=_counted(path[-1]) if subtree else None,
    )


def delete_subtree(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray) -> Deleted:
    """Gives up the last block of exactly these tokens and what follows it, as far as nobody needs it.

    Raises:
      PrefixNotFoundError: the tokens are not all there.
    """
    index, scope = caches.radix.index, _enabled_scope(caches, method, options, ids)
    index.expire_pins()
    blocks = _subtree(index.path(scope, ids)[-1])
    blocks.sort(key=lambda block: (-block.depth, block.digest))
    index.delete(scope, ids)
    deleted = [block.digest.hex() for block in blocks if not block.alive]
    blocked = [(block.digest.hex(), _reason(block)) for block in blocks if block.alive]
    reasons: dict[str, int] = {}
    for _, reason in blocked:
        reasons[reason] = reasons.get(reason, 0) + 1
    return Deleted(
        deleted_block_ids=tuple(deleted[:MAX_LISTED_BLOCKS]),
        deleted_block_count=len(deleted),
        blocked_blocks=tuple({"block_id": name, "reason": reason} for name, reason in blocked[:MAX_LISTED_BLOCKS]),
        blocked_block_count=len(blocked),
        blocked_reasons=reasons,
    )


def set_retention(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray, retention: int) -> Retained:
    """Puts the last block of exactly these tokens, and what follows it, in a class.

    Raises:
      PrefixNotFoundError: the tokens are not all there.
    """
    index, scope = caches.radix.index, _enabled_scope(caches, method, options, ids)
    root = index.path(scope, ids)[-1]
    return Retained(root.digest.hex(), index.set_retention(scope, ids, retention), retention, -retention)


def pin(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray, ttl_s: float) -> Pinned:
    """Keeps exactly these tokens for so many seconds from now, whatever was said of them before.

    Raises:
      PrefixNotFoundError: the tokens are not all there.
      PinRefusedError: pins would hold more than they may.
    """
    index, scope = caches.radix.index, _enabled_scope(caches, method, options, ids)
    older = index.pins_on(index.path(scope, ids)[-1])
    made = index.pin(scope, ids, ttl_s)
    for pin in older:
        index.unpin(pin)
    return _pinned(caches, made.blocks, scope, ttl_s)


def unpin(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray) -> Pinned:
    """Ends the pin of exactly these tokens, if there is one.

    Raises:
      PrefixNotFoundError: the tokens are not all there.
    """
    index, scope = caches.radix.index, _enabled_scope(caches, method, options, ids)
    path = index.path(scope, ids)
    for pin in index.pins_on(path[-1]):
        index.unpin(pin)
    return _pinned(caches, path, scope, 0.0)


def _scope(caches: Caches, method: str, options: PrefixOptions) -> Scope:
    return caches.chains.scope(method, options.salt, options.tenant)


def _refused(caches: Caches, method: str, tokens: int, snapshot: bool = False) -> PrefixMatch | None:
    """The answer where no rows are shared."""
    _check_method(caches, method)
    reason, size = caches.radix.hindrance(method), caches.radix.index.block_tokens
    if reason is None:
        return None
    return PrefixMatch(False, method, size, tokens, reason=reason, snapshot=snapshot)


def _enabled_scope(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray) -> Scope:
    _check_method(caches, method)
    reason = caches.radix.hindrance(method)
    if reason is not None:
        raise PrefixDisabledError(reason)
    size = caches.radix.index.block_tokens
    if len(ids) < size:
        raise RequestError(f"{len(ids)} tokens are less than one block of {size}", code="prefix_too_short")
    return _scope(caches, method, options)


def _check_method(caches: Caches, method: str) -> None:
    if method not in caches.chains.methods:
        raise RequestError(f"sparse_method {method[:80]!r} is not served", param="sparse_method")


def _matched(
    caches: Caches,
    method: str,
    options: PrefixOptions,
    tokens: int,
    last: Block | None,
    pages: int,
    degraded: bool,
    miss: dict[str, Any] | None,
) -> PrefixMatch:
    index = caches.radix.index
    size, blocks = index.block_tokens, last.depth if last else 0
    usable = max(0, tokens - 1) // size
    return PrefixMatch(
        enabled=True,
        method=method,
        block_size=size,
        prompt_tokens=tokens,
        usable_tokens=usable * size,
        matched_tokens=blocks * size,
        matched_blocks=blocks,
        match_ratio=blocks / usable if usable else 0.0,
        resident_kv_tokens=pages * size,
        quality_degraded=degraded,
        last_block_id=last.digest.hex() if last else None,
        live_blocks=index.blocks_of[options.tenant],
        miss=miss,
    )


def _rows_of(path: list[Block]) -> tuple[dict[int, int], list[Cut]]:
    """Pages by number of the block in a path whose rows a reader of the path has, and the path's pruned ranges."""
    rows: dict[int, int] = {}
    cuts: list[Cut] = []
    node: Block | None = next((block for block in reversed(path) if block.pages is not None), None)
    while node is not None and node.parent is not None:
        rows[node.depth - 1] = len(node.pages or ())
        if node.cut is not None:
            cuts.append(node.cut)
        node = node.base
    return rows, cuts[::-1]


def _record(cut: Cut) -> dict[str, Any]:
    return {
        "range": [cut.start, cut.stop],
        "policy": cut.policy,
        "logical_tokens": cut.stop - cut.start,
        "retained_tokens": len(cut.kept),
        "quality_degraded": True,
    }


def _subtree(root: Block) -> list[Block]:
    found, stack = [], [root]
    while stack:
        found.append(stack.pop())
        stack.extend(found[-1].children.values())
    return found


def _counted(root: Block) -> dict[str, Any]:
    blocks = referenced = pinned = leaves = 0
    stack = [root]
    while stack and blocks < MAX_SUBTREE_BLOCKS:
        block = stack.pop()
        blocks += 1
        referenced += block.refs > 0
        pinned += block.pins > 0
        leaves += not block.children
        stack.extend(block.children.values())
    return {
        "block_count": blocks,
        "referenced_block_count": referenced,
        "pinned_block_count": pinned,
        "leaf_block_count": leaves,
        "truncated": bool(stack),
    }


def _reason(block: Block) -> str:
    return "referenced" if block.refs else "pinned" if block.pins else "has_children"


def _pinned(caches: Caches, path: tuple[Block, ...], scope: Scope, ttl_s: float) -> Pinned:
    index = caches.radix.index
    rows, _ = _rows_of(list(path))
    each = index.max_pinned_pages[1]
    return Pinned(
        pinned=ttl_s > 0,
        last_block_id=path[-1].digest.hex(),
        pinned_blocks=len(path) if ttl_s > 0 else 0,
        resident_kv_tokens=sum(rows.values()) * index.block_tokens,
        ttl_s=ttl_s,
        pinned_pages=index.pinned_pages[scope.tenant],
        max_pinned_pages=each,
    )
