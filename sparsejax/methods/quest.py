"""Quest (arXiv 2406.10774): read only the pages whose keys could matter to the current query.

Each head-page carries the element-wise minimum and maximum of its keys; together they bound the attention logit of any
key in the page from above. Per KV head the pages with the best bound are read, and always the last (current) page.
"""

from __future__ import annotations

import dataclasses

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import (
    Aux,
    AuxSpec,
    Method,
    SelectContext,
    Selection,
    Written,
    choice_param,
    integer_param,
    knob,
    split_rows,
)
from sparsejax.pallas_kernels import api

MIN, MAX = "quest_min", "quest_max"


@dataclasses.dataclass(frozen=True)
class Params:
    quest_chunk_size: int = knob(16, "page size; the pool takes it over", "tokens")
    quest_skip_layers: int = knob(2, "first layers that read everything", "layers")
    sink_keep_tokens: int = knob(64, "enlarges the read budget", "tokens")
    decode_keep_tokens: int = knob(4096, "read budget", "tokens")
    recent_keep_tokens: int = knob(512, "enlarges the read budget", "tokens")
    quest_select_scope: str = knob("kv_head", "one page set per KV head, or one 'shared' by all heads")

    def __post_init__(self) -> None:
        integer_param("quest_chunk_size", self.quest_chunk_size, 1)
        integer_param("quest_skip_layers", self.quest_skip_layers, 0)
        for name in ("sink_keep_tokens", "decode_keep_tokens", "recent_keep_tokens"):
            integer_param(name, getattr(self, name), 0)
        choice_param("quest_select_scope", self.quest_select_scope, ("kv_head", "shared"))
        if self.budget == 0:
            raise MethodError("sink_keep_tokens + decode_keep_tokens + recent_keep_tokens must be above 0")

    @property
    def budget(self) -> int:
        """Rows a sparse layer may read."""
        return self.sink_keep_tokens + self.decode_keep_tokens + self.recent_keep_tokens

    def scored_pages(self, geometry: Geometry) -> int:
        """K: pages chosen by score; the last page comes on top."""
        return min(max(3, self.budget // geometry.page_size) - 1, geometry.max_pages - 1)

    def view_pages(self, geometry: Geometry) -> int:
        """Columns of the selected view: enough for K + 1 pages and for every row that is short enough to read whole."""
        return min(max(self.scored_pages(geometry) + 1, geometry.pages(self.budget)), geometry.max_pages)


def aux(params: Params, geometry: Geometry) -> dict[str, AuxSpec]:
    bounds = AuxSpec("page", (geometry.head_dim,))
    return {MIN: bounds, MAX: bounds}


def role(params: Params, layer: int) -> str:
    return "dense" if layer < params.quest_skip_layers else "selector"


def on_write(params: Params, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    low, high = api.page_bounds(
        page_aux[MIN],
        page_aux[MAX],
        written.keys,
        written.head_pages,
        written.offsets,
        num_valid=written.num_valid,
        page_size=geometry.page_size,
        implementation=written.implementation,
    )
    return {**page_aux, MIN: low, MAX: high}, row_aux


def select(params: Params, context: SelectContext) -> Selection:
    geometry, view = context.geometry, context.view
    width = params.view_pages(geometry)
    if context.role == "dense" or width >= geometry.max_pages:
        return Selection(view)
    page_size = geometry.page_size
    scores = api.page_scores(
        context.query,
        context.aux[MIN],
        context.aux[MAX],
        view,
        page_size=page_size,
        implementation=context.implementation,
    )
    chosen = api.select_pages(
        scores,
        view,
        num_scored=params.scored_pages(geometry),
        width=width,
        budget=params.budget,
        page_size=page_size,
        shared=params.quest_select_scope == "shared",
        implementation=context.implementation,
    )
    return Selection(chosen)


def read_count(params: Params, length: int, geometry: Geometry) -> float:
    num_scored = params.scored_pages(geometry)
    whole = length <= params.budget or geometry.pages(length) <= num_scored + 1
    if whole or params.view_pages(geometry) >= geometry.max_pages:
        return length
    sparse = num_scored * geometry.page_size + (length - 1) % geometry.page_size + 1
    dense_layers = min(params.quest_skip_layers, geometry.num_layers)
    return (dense_layers * length + (geometry.num_layers - dense_layers) * sparse) / geometry.num_layers


def page_size(params: Params) -> int:
    return params.quest_chunk_size


def build(params: Params) -> Method:
    return Method(
        "quest",
        "selection",
        params,
        summary="read the pages that could matter to the query",
        paper="arXiv 2406.10774",
        aux=aux,
        role=role,
        on_write=on_write,
        select=select,
        read_count=read_count,
        page_size=page_size,
    )


def sized(rows: int) -> Params:
    return Params(**split_rows(rows))


PARAMS = Params
NOTES = {
    "Keeps": """
        Everything. A decoded token reads, per KV head, the pages whose keys could match its query best, up to S + K + R
        = `sink_keep_tokens` + `decode_keep_tokens` + `recent_keep_tokens` rows, and always the current page. The first
        `quest_skip_layers` layers read all.
    """,
    "Acts": "In every decode step. Prompts are computed densely.",
    "Costs": """
        All rows, and two bounds per page: 1 / page size more memory than dense attention. A step reads the bounds and
        the rows of the budget.
    """,
    "Use it": "When memory suffices and time does not: nothing is ever lost, so any later turn can ask for anything.",
}
