"""What the prefix cache says of itself, as clients see it. Sizes in tokens unless they are named otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """What a request with these tokens would begin with.

    Attributes:
      enabled: rows are shared between requests of this method; if not, `reason` says why.
      block_size: tokens of a block.
      prompt_tokens: that were asked for.
      usable_tokens: of these, those that could be found: whole blocks, and one token is always computed.
      matched_tokens, matched_blocks, match_ratio: found; the ratio is that to the usable ones.
      resident_kv_tokens: of the matched ones, those that have rows.
      host_tokens: behind the matched ones, in host memory: a request brings them back if there is room.
      quality_degraded: rows of the match are missing, or were computed while others were.
      last_block_id: digest of the match's last block, hexadecimal.
      live_blocks: of this API key, whatever they are of.
      miss: why less was found than could have been: reason, message, and the token where it ends.
      snapshot: read beside the engine's thread, see `radix_control.routed`.
    """

    enabled: bool
    method: str
    block_size: int
    prompt_tokens: int
    usable_tokens: int = 0
    matched_tokens: int = 0
    matched_blocks: int = 0
    match_ratio: float = 0.0
    resident_kv_tokens: int = 0
    host_tokens: int = 0
    quality_degraded: bool = False
    last_block_id: str | None = None
    live_blocks: int = 0
    reason: str | None = None
    miss: dict[str, Any] | None = None
    snapshot: bool = False


@dataclasses.dataclass(frozen=True)
class BlockInfo:
    """One block of a path.

    Attributes:
      block_id: digest, hexadecimal.
      logical_block_idx, logical_tokens: its place in the path, and its tokens.
      resident_kv_tokens: rows that the path has from it: none inside a pruned range, at the range's end all that is
        left of the range.
      ref_count, pin_count: requests or conversations, and pins, that need it or a block below.
      retention, eviction_priority: its class, and the same with the other sign.
      child_count: of blocks that follow it.
      device_present: it has rows, be it for another path.
      hits, idle_s: requests that found it, and seconds since the last use.
      quality_degraded: rows before it or of it are missing, or it was computed while some were.
      prune: of the nearest pruned range at or before it.
    """

    block_id: str
    logical_block_idx: int
    logical_tokens: int
    resident_kv_tokens: int
    ref_count: int
    pin_count: int
    retention: int
    eviction_priority: int
    child_count: int
    device_present: bool
    hits: int
    idle_s: float
    quality_degraded: bool
    prune: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class PrefixPath:
    """The longest known beginning of some tokens, rows or not. See `PrefixMatch`.

    Attributes:
      selector_block_count: whole blocks of the tokens.
      hit_block_count, hit_len: of these found, and their tokens.
      path_blocks: those from `offset` on, at most as many as were asked for; `truncated` if some were left out.
      subtree: counts of the last block and all below, if asked for; `truncated` if there are more.
    """

    matched: bool
    enabled: bool
    method: str
    block_size: int
    selector_block_count: int = 0
    hit_block_count: int = 0
    hit_len: int = 0
    resident_kv_tokens: int = 0
    last_block_id: str | None = None
    offset: int = 0
    path_blocks: tuple[BlockInfo, ...] = ()
    truncated: bool = False
    reason: str | None = None
    subtree: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Deleted:
    """What became of a subtree. Lists have at most `radix_control.MAX_LISTED_BLOCKS` entries, counts are exact.

    `blocked_blocks` are those that stay, deepest first: `referenced` by a request or a conversation, `pinned`, or with
    children that stay (`has_children`).
    """

    deleted_block_ids: tuple[str, ...]
    deleted_block_count: int
    blocked_blocks: tuple[dict[str, Any], ...]
    blocked_block_count: int
    blocked_reasons: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Retained:
    """A subtree got a class: higher ones stay longer. `eviction_priority` is the same with the other sign."""

    root_block_id: str
    updated_block_count: int
    retention: int
    eviction_priority: int
    matched: bool = True


@dataclasses.dataclass(frozen=True)
class Pinned:
    """A path is kept, or is not any more.

    Attributes:
      pinned: it is.
      last_block_id: where it ends.
      pinned_blocks, resident_kv_tokens: of the path, and its rows.
      ttl_s: left.
      pinned_pages, max_pinned_pages: that pins of this API key hold, and may hold.
    """

    pinned: bool
    last_block_id: str
    pinned_blocks: int
    resident_kv_tokens: int
    ttl_s: float
    pinned_pages: int
    max_pinned_pages: int
