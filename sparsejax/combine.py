"""Composition: several single-axis methods become one. Refusals come from what members declare, never from names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import (
    Aux,
    AuxSpec,
    DecodedContext,
    EvictContext,
    HiddenContext,
    Method,
    ObserveContext,
    Phase,
    PrefillContext,
    SelectContext,
    Selection,
    Written,
)

_ORDER = (Granularity.SEQUENCE, Granularity.LAYER, Granularity.HEAD)
_AXES = ("retention", "selection", "prefill")


def compose(members: tuple[Method, ...]) -> Method:
    """One method that keeps like its retention member and reads like its selection member.

    Its prompt chunks attend, and are compacted before the last one, like its prefill member says.

    Raises:
      MethodError: with every reason why the members don't go together.
    """
    members = tuple(member for member in members if member.axis != "none") or members[:1]
    if len(members) == 1:
        return members[0]
    reasons = []
    for axis in _AXES:
        names = [member.name for member in members if member.axis == axis]
        if len(names) > 1:
            reasons.append(f"{' and '.join(names)} both decide {axis}; choose one")
    sizes = {member.name: member.page_size(member.params) for member in members}
    if len({size for size in sizes.values() if size is not None}) > 1:
        reasons.append("members ask for different page sizes: " + ", ".join(f"{n} {s}" for n, s in sizes.items() if s))
    for member in members:
        reasons += member.refuses(member.params, tuple(other for other in members if other is not member))
    if len({member.survey_reduction for member in members if member.survey is not None}) > 1:
        reasons.append("members join what layers say in different ways")
    if reasons:
        raise MethodError("; ".join(reasons))
    params = Composed(members)
    first = next(axis for axis in _AXES if params.on(axis))
    selection, prefill = params.on("selection"), params.on("prefill")
    composed = Method(
        name="+".join(member.name for member in members),
        axis=first,  # type: ignore[arg-type]
        params=params,
        summary="; ".join(member.summary for member in members),
        paper=", ".join(member.paper for member in members if member.paper),
        members=members,
        granularity=max((member.granularity for member in members), key=_ORDER.index),
        aux=_aux,
        role=_role,
        page_size=_page_size,
        check=_check,
        chunk_dependent=any(member.chunk_dependent for member in members),
        rotary="row" if any(member.rotary == "row" for member in members) else "position",
        private_rows=any(member.private_rows for member in members),
    )
    joined = {"on_write": _on_write, "observe": _observe, "on_decoded": _on_decoded, "survey": _survey, "bind": _bind}
    hooks: dict[str, Any] = {name: hook for name, hook in joined.items() if params.with_hook(name)}
    if params.with_hook("replays"):
        hooks |= {"replays": _replays, "replay_tokens": _replay_tokens}
    if "survey" in hooks:
        hooks["survey_reduction"] = next(member.survey_reduction for member in members if member.survey is not None)
    if any(member.evicts for member in members):
        hooks |= {"keep_rows": _keep_rows, "keep_count": _keep_count, "due": _due, "peak": _peak}
    if params.with_hook("count_rows"):
        hooks |= {"counted": _counted, "count_rows": _count_rows}
    between = params.keeper("chunk")
    if between is not None and between.prompt_peak is not None:
        hooks["prompt_peak"] = _prompt_peak
    if any(member.on_hidden is not None for member in members):
        hooks |= {"on_hidden": _on_hidden, "hidden_layer": _hidden_layer}
    if selection is None and params.with_hook("attend_token"):
        hooks["attend_token"] = _attend_token
    if selection is not None:
        hooks |= {"select": _select, "read_count": _read_count}
    if prefill is not None and prefill.attend_prefill is not None:
        hooks |= {"attend_prefill": _attend_prefill, "attends_end": prefill.attends_end}
    return dataclasses.replace(composed, **hooks)


@dataclasses.dataclass(frozen=True)
class Composed:
    """Parameters of a composition: its members, each with its own."""

    members: tuple[Method, ...]

    def on(self, axis: str) -> Method | None:
        """The member that decides an axis."""
        return next((member for member in self.members if member.axis == axis), None)

    def keeper(self, phase: Phase) -> Method | None:
        """The member that says which rows stay: between chunks the prefill member, if there is one."""
        prefill = self.on("prefill")
        member = prefill if prefill is not None and phase == "chunk" else self.on("retention")
        return member if member is not None and member.evicts else None

    def with_hook(self, name: str) -> list[tuple[Callable[..., Any], Any]]:
        """(hook, params) of the members that have it; see `having`."""
        return [(getattr(member, name), member.params) for member in self.having(name)]

    def having(self, name: str) -> list[Method]:
        """Members with a hook. Of several that share one and the same, the first counts, in the order of `_AXES`."""
        found: dict[Callable[..., Any], Method] = {}
        for axis in _AXES:
            member = self.on(axis)
            hook = None if member is None else getattr(member, name)
            if member is not None and hook is not None:
                found.setdefault(hook, member)
        return list(found.values())


def _aux(params: Composed, geometry: Geometry) -> dict[str, AuxSpec]:
    return {name: spec for member in params.members for name, spec in member.aux_specs(geometry).items()}


def _roles(params: Composed, layer: int) -> dict[str, str]:
    """The role of a layer to each member, by axis."""
    return {member.axis: member.role(member.params, layer) for member in params.members}


def _role(params: Composed, layer: int) -> str:
    """Roles of all members: layers are alike only to all of them."""
    roles = _roles(params, layer)
    return "/".join(roles[axis] for axis in ("selection", "prefill") if axis in roles) or "dense"


def _role_on(params: Composed, axis: str, role: str) -> str:
    """The part of a joined role that one member gave."""
    axes = [name for name in ("selection", "prefill") if params.on(name)]
    return role.split("/")[axes.index(axis)]


def _on_write(params: Composed, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    for hook, own in params.with_hook("on_write"):
        page_aux, row_aux = hook(own, geometry, page_aux, row_aux, written)
    return page_aux, row_aux


def _observe(params: Composed, context: ObserveContext) -> tuple[Aux, Aux]:
    for member in params.having("observe"):
        assert member.observe is not None
        if context.phase == "replay" and member.replays is None:
            continue
        page_aux, row_aux = member.observe(member.params, context)
        context = context._replace(page_aux=page_aux, row_aux=row_aux)
    return context.page_aux, context.row_aux


def _attend_token(params: Composed, context: ObserveContext) -> tuple[jax.Array, Aux]:
    ((hook, own),) = params.with_hook("attend_token")
    return hook(own, context)


def _replays(params: Composed, prompt_tokens: int) -> tuple[int, ...]:
    ((hook, own),) = params.with_hook("replays")
    return hook(own, prompt_tokens)


def _replay_tokens(params: Composed, prompt: np.ndarray, index: int) -> np.ndarray:
    ((hook, own),) = params.with_hook("replay_tokens")
    return hook(own, prompt, index)


def _on_decoded(params: Composed, context: DecodedContext) -> Aux:
    for hook, own in params.with_hook("on_decoded"):
        context = context._replace(row_aux=hook(own, context))
    return context.row_aux


def _on_hidden(params: Composed, context: HiddenContext) -> Aux:
    ((hook, own),) = params.with_hook("on_hidden")
    return hook(own, context)


def _hidden_layer(params: Composed, num_layers: int) -> int:
    member = next(member for member in params.members if member.on_hidden is not None)
    return member.hidden_layer(member.params, num_layers)


def _bind(params: Composed, encode: Callable[[str], list[int]]) -> Composed:
    return Composed(tuple(bound(member, encode) for member in params.members))


def _select(params: Composed, context: SelectContext) -> Selection:
    member = params.on("selection")
    assert member is not None
    assert member.select is not None
    return member.select(member.params, context._replace(role=_role_on(params, "selection", context.role)))


def _attend_prefill(params: Composed, context: PrefillContext) -> tuple[jax.Array, Any]:
    member = params.on("prefill")
    assert member is not None
    assert member.attend_prefill is not None
    return member.attend_prefill(member.params, context._replace(role=_role_on(params, "prefill", context.role)))


def _survey(params: Composed, context: EvictContext) -> jax.Array:
    member = params.keeper(context.phase)
    if member is None or member.survey is None:
        return jnp.zeros(())
    return member.survey(member.params, context)


def _keep_rows(params: Composed, context: EvictContext) -> jax.Array:
    member = params.keeper(context.phase)
    assert member is not None
    assert member.keep_rows is not None
    return member.keep_rows(member.params, context)


def _keep_count(params: Composed, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    member = params.keeper(phase)
    return lengths if member is None else member.keep_count(member.params, phase, lengths)


def _counted(params: Composed, phase: Phase, lengths: np.ndarray) -> int:
    member = params.keeper(phase)
    return 0 if member is None else member.counted(member.params, phase, lengths)


def _count_rows(params: Composed, context: EvictContext) -> jax.Array:
    member = params.keeper(context.phase)
    assert member is not None
    assert member.count_rows is not None
    return member.count_rows(member.params, context)


def _due(params: Composed, phase: Phase, done_tokens: int) -> bool:
    member = params.keeper(phase)
    return member is not None and member.due(member.params, phase, done_tokens)


def _peak(params: Composed, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    """What a prefill member lets a prompt grow to, then what a retention member holds while it decodes."""
    prefill, retention = params.on("prefill"), params.on("retention")
    if prefill is None or not prefill.evicts or not prompt_tokens:
        if retention is None:
            return lengths + prompt_tokens + decode_tokens
        return retention.peak(retention.params, lengths, prompt_tokens, decode_tokens)
    prompt = prefill.peak(prefill.params, lengths, prompt_tokens, 0)
    if retention is None:
        return prompt + decode_tokens
    kept = retention.keep_count(retention.params, "prompt", prompt)
    return np.maximum(prompt, retention.peak(retention.params, kept, 0, decode_tokens))


def _prompt_peak(params: Composed, lengths: np.ndarray, prompt_tokens: int, chunk_tokens: int) -> np.ndarray:
    member = params.keeper("chunk")
    assert member is not None
    assert member.prompt_peak is not None
    return member.prompt_peak(member.params, lengths, prompt_tokens, chunk_tokens)


def _read_count(params: Composed, length: int, geometry: Geometry) -> float:
    member = params.on("selection")
    assert member is not None
    return member.read_count(member.params, length, geometry)


def _page_size(params: Composed) -> int | None:
    sizes = [member.page_size(member.params) for member in params.members]
    return next((size for size in sizes if size is not None), None)


def _check(params: Composed, geometry: Geometry) -> list[str]:
    return [reason for member in params.members for reason in member.check(member.params, geometry)]


def bound(method: Method, encode: Callable[[str], list[int]]) -> Method:
    """The same method with the token ids it needs of a tokenizer."""
    if method.bind is None:
        return method
    params = method.bind(method.params, encode)
    members = params.members if isinstance(params, Composed) else ()
    return dataclasses.replace(method, params=params, members=members)


def with_granularity(method: Method, granularity: Granularity) -> Method:
    """The same method with finer (or coarser) page allocations; results do not change. For tests and experiments."""
    return dataclasses.replace(method, granularity=granularity)
