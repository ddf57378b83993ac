"""Composition: several single-axis methods become one. Refusals come from what members declare, never from names."""

from __future__ import annotations

import dataclasses

import jax

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import Aux, AuxSpec, EvictContext, Method, Phase, SelectContext, Selection, Written

_ORDER = (Granularity.SEQUENCE, Granularity.LAYER, Granularity.HEAD)


def compose(members: tuple[Method, ...]) -> Method:
    """One method that keeps like its retention member and reads like its selection member.

    Raises:
      MethodError: with every reason why the members don't go together.
    """
    members = tuple(member for member in members if member.axis != "none") or members[:1]
    if len(members) == 1:
        return members[0]
    reasons = []
    for axis in ("retention", "selection", "prefill"):
        names = [member.name for member in members if member.axis == axis]
        if len(names) > 1:
            reasons.append(f"{' and '.join(names)} both decide {axis}; choose one")
    sizes = {member.name: member.page_size(member.params) for member in members}
    if len({size for size in sizes.values() if size is not None}) > 1:
        reasons.append("members ask for different page sizes: " + ", ".join(f"{n} {s}" for n, s in sizes.items() if s))
    if reasons:
        raise MethodError("; ".join(reasons))
    retention = next((member for member in members if member.axis == "retention"), None)
    selection = next((member for member in members if member.axis == "selection"), None)
    composed = Method(
        name="+".join(member.name for member in members),
        axis="retention" if retention else "selection",
        params=Composed(members),
        summary="; ".join(member.summary for member in members),
        paper=", ".join(member.paper for member in members if member.paper),
        members=members,
        granularity=max((member.granularity for member in members), key=_ORDER.index),
        aux=_aux,
        role=_role,
        on_write=_on_write,
        page_size=_page_size,
        check=_check,
    )
    if retention is not None:
        composed = dataclasses.replace(composed, keep_rows=_keep_rows, keep_count=_keep_count, peak=_peak)
    if selection is not None:
        composed = dataclasses.replace(composed, select=_select, read_count=_read_count)
    return composed


@dataclasses.dataclass(frozen=True)
class Composed:
    """Parameters of a composition: its members, each with its own."""

    members: tuple[Method, ...]

    def on(self, axis: str) -> Method:
        return next(member for member in self.members if member.axis == axis)


def _aux(params: Composed, geometry: Geometry) -> dict[str, AuxSpec]:
    return {name: spec for member in params.members for name, spec in member.aux_specs(geometry).items()}


def _role(params: Composed, layer: int) -> str:
    roles = [member.role(member.params, layer) for member in params.members if member.axis == "selection"]
    return roles[0] if roles else "dense"


def _on_write(params: Composed, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    for member in params.members:
        if member.on_write is not None:
            page_aux, row_aux = member.on_write(member.params, geometry, page_aux, row_aux, written)
    return page_aux, row_aux


def _select(params: Composed, context: SelectContext) -> Selection:
    member = params.on("selection")
    assert member.select is not None
    return member.select(member.params, context)


def _keep_rows(params: Composed, context: EvictContext) -> jax.Array:
    member = params.on("retention")
    assert member.keep_rows is not None
    return member.keep_rows(member.params, context)


def _keep_count(params: Composed, phase: Phase, length: int) -> int:
    member = params.on("retention")
    return member.keep_count(member.params, phase, length)


def _peak(params: Composed, length: int, prompt_tokens: int, decode_tokens: int) -> int:
    member = params.on("retention")
    return member.peak(member.params, length, prompt_tokens, decode_tokens)


def _read_count(params: Composed, length: int, geometry: Geometry) -> float:
    member = params.on("selection")
    return member.read_count(member.params, length, geometry)


def _page_size(params: Composed) -> int | None:
    sizes = [member.page_size(member.params) for member in params.members]
    return next((size for size in sizes if size is not None), None)


def _check(params: Composed, geometry: Geometry) -> list[str]:
    return [reason for member in params.members for reason in member.check(member.params, geometry)]


def with_granularity(method: Method, granularity: Granularity) -> Method:
    """The same method with finer (or coarser) page allocations; results do not change. For tests and experiments."""
    return dataclasses.replace(method, granularity=granularity)
