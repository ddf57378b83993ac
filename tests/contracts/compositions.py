"""Every method, storage and composition that discovery finds, with knobs small enough for a tiny model.

A new method takes part in all contract tests once its knobs stand in `KNOBS` (or in `DEFAULTS_ARE_FINE`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.method import Method
from tests.core.harness import Session

KNOBS: dict[str, Any] = {
    "sink_keep_tokens": 2,
    "recent_keep_tokens": 5,
    "decode_keep_tokens": 6,
    "observation_window_size": 4,
    "snapkv_decode_eviction": True,
    "decode_eviction_interval": 8,
    "streamingllm_decode_trigger_ratio": 3.0,
    "pyramidkv_least_ratio": 0.3,
    "head_budget_ceiling": 1.5,
    "kvzip_token_budget": 13,
    "kvzip_score_chunk_size": 16,
    "kvzip_prev_postfix_size": 3,
    "kvzip_protect_sink": 1,
    "kvzip_protect_recent": 2,
    "omnikv_prefill_full_attention_layers": 0,
    "omnikv_prefill_keep_tokens": 6,
    "omnikv_prefill_sink_keep_tokens": 2,
    "omnikv_prefill_recent_keep_tokens": 3,
    "quest_chunk_size": 4,
    "quest_skip_layers": 1,
    "rkv_compression_interval": 4,
    "rkv_observation_tokens": 3,
    "rkv_kernel_size": 3,
    "skipkv_compression_interval": 6,
    "skipkv_observation_tokens": 4,
    "skipkv_kernel_size": 3,
    "skipkv_similarity_threshold": 0.2,
    "skipkv_sentence_min_tokens": 2,
    "skipkv_sentence_max_tokens": 5,
    "skipkv_sentence_embedding_layer": 0,
    "skipkv_max_tracked_sentences": 3,
    "skipkv_delimiter_ids": tuple(range(1, 61, 3)),
    "skipkv_redundancy_window": 4,
    "skipkv_segment_size": 2,
    "flashprefill_v2_k_block_m": 16,
    "flashprefill_v2_k_block_n": 64,
    "flashprefill_v2_abs_threshold": 0.9,
    "flashprefill_v2_attention_sink_blocks": 0,
    "flashprefill_v2_window_blocks": 1,
    "flashprefill_v2_last_query_blocks": 0,
    "flashprefill_v2_min_sparse_q_len": 0,
    "h2o_prefill_budget": 17,
    "h2o_decode_budget": 11,
    "h2o_recent_ratio": 0.4,
    "h2o_prefill_score_window": 5,
    "h2o_decode_eviction": True,
    "h2o_decode_eviction_interval": 6,
}
"""Small values by knob name."""

DEFAULTS_ARE_FINE = {
    "sparse_prefill_score_mode",
    "softmax_domain",
    "pool_kernel_size",
    "pool_type",
    "head_mode",
    "streamingllm_position_mode",
    "head_budgets",
    "head_budget_floor",
    "pyramid_budget_mode",
    "pyramid_layer_ratios",
    "pyramidkv_start_layer",
    "pyramidkv_start_ratio",
    "pyramidkv_least_layer",
    "pyramidkv_beta",
    "kvzip_instruction",
    "kvzip_variant",
    "kvzip_query_reduction",
    "quest_select_scope",
    "rkv_alpha",
    "rkv_scope",
    "rkv_compress_prompt",
    "rkv_score_chunk_mb",
    "rkv_similarity_threshold",
    "rkv_recent_similar_keep",
    "rkv_redundancy_window",
    "rkv_max_redundancy_tokens",
    "skipkv_importance",
    "skipkv_mix_lambda",
    "skipkv_enable_sentence_scoring",
    "skipkv_sentence_score_weight",
    "skipkv_alpha",
    "skipkv_max_redundancy_tokens",
    "skipkv_enable_activation_steering",
    "h2o_logit_scale",
    "h2o_head_reduction",
    "h2o_prefill_compaction",
    "flashprefill_v2_use_mean_correction",
    "fp8_kv_scale_mode",
    "fp8_kv_scale_path",
}
"""Knobs that are modes, not sizes."""

READS_BLOCKS = {"flashprefill_v2"}
"""Methods that leave out blocks of at least 64 tokens, more than texts here: see `test_flashprefill`."""

PER_HEAD = "snapkv(head_mode=per_kv_head,sparse_prefill_score_mode=probability,pool_kernel_size=3)"


def small(composition: str) -> dict[str, Any]:
    """The knobs of `KNOBS` that members of a composition have."""
    names = {name.partition("(")[0] for name in composition.split("+")}
    knobs = registry.method_params()
    return {knob: value for knob, value in KNOBS.items() if any(owner in names for owner, _ in knobs.get(knob, ()))}


def depends_on_chunks(composition: str) -> bool:
    """Whether how these tests cut a prompt can change what comes of it."""
    method, _ = registry.resolve(composition, small(composition))
    members = method.members or (method,)
    return any(member.chunk_dependent and member.name not in READS_BLOCKS for member in members)


def _allowed(composition: str) -> bool:
    try:
        registry.resolve(composition, small(composition))
    except MethodError:
        return False
    return True


def methods(sizes: tuple[int, ...] = (1, 2)) -> list[str]:
    """Single methods (size 1), and all allowed pairs (2) and triples (3) of different axes."""
    entries = [entry for entry in registry.available().values() if entry.kind == "method"]
    order = ("none", "retention", "selection", "prefill")
    entries.sort(key=lambda entry: order.index(entry.axis))
    found = [entry.name for entry in entries if 1 in sizes]
    acting = [entry for entry in entries if entry.axis != "none"]
    for size in sizes:
        for group in itertools.combinations(acting, size):
            name = "+".join(entry.name for entry in group)
            if size > 1 and len({entry.axis for entry in group}) == size and _allowed(name):
                found.append(name)
    return found


def storages() -> list[str]:
    return [name for name, entry in registry.available().items() if entry.kind == "storage"]


RAGGED = [
    "snapkv(head_mode=per_kv_head,head_budgets=adaptive,snapkv_decode_eviction=false)",
    "kvzip(kvzip_variant=pair)",
]
"""Heads keep different numbers of rows, as their contents say."""

ALWAYS = (
    *("dense+fp8_kv", "quest+fp8_kv", "snapkv+fp8_kv", "h2o+fp8_kv"),
    *("snapkv+quest", "pyramidkv+quest", "h2o+h2o_prefill", "snapkv+quest+fp8_kv"),
)
"""Combinations of every kind."""
METHODS = [*methods(), PER_HEAD, *RAGGED]
_STORED = [f"{name}+{storage}" for name in METHODS for storage in storages() if storage != registry.DEFAULT_STORAGE]
COMPOSITIONS = [*(name for name in METHODS if "+" not in name), *ALWAYS]
RARE = [name for name in (*METHODS, *_STORED, *methods((3,))) if name not in COMPOSITIONS]
"""Combinations that are left to the slow tests: there are too many for every run."""
EVICTING = [name for name in COMPOSITIONS if registry.resolve(name, small(name))[0].evicts]


SELECTED: list[tuple[int, np.ndarray, np.ndarray]] = []
"""What `Recorded` saw: layer, head-pages [batch, kv_heads, columns], rows to read [batch, kv_heads]."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A `select` hook that also tells the host what it selected."""

    select: Any

    def __call__(self, params, context):
        selection = self.select(params, context)
        view = selection.view
        jax.debug.callback(
            lambda *seen: SELECTED.append((int(seen[0]), *(np.asarray(x) for x in seen[1:]))),
            context.layer,
            view.head_pages(0, view.table.shape[2]),
            view.lengths,
        )
        return selection


def start(composition: str, **options: Any) -> Session:
    """A fresh session; programs are shared by all that differ in content only."""
    params = small(composition)
    select = registry.resolve(composition, params)[0].select
    return Session(composition, params=params, select=select and Recorded(select), **options)


def dense_with_storage_of(composition: str) -> str:
    """The dense method on the same storage."""
    storage = registry.resolve(composition, small(composition))[1].name
    return registry.DEFAULT_METHOD if storage == registry.DEFAULT_STORAGE else f"{registry.DEFAULT_METHOD}+{storage}"


def budget(method: Method) -> int:
    """The longest row for which the method does nothing, at most 24."""
    geometry = Session(page_size=4).geometry

    def untouched(length: int) -> bool:
        phases = ("chunk", "prompt", "token")
        shape = geometry.table_shape(method.granularity)
        kept = all((method.kept_after(phase, np.full(shape, length)) == length).all() for phase in phases)
        return kept and method.rows_read(length, geometry) == length

    return next(length - 1 for length in range(1, 26) if length == 25 or not untouched(length))
