"""What is compared: compositions of the registry, and deliberately wrong ones that must come out worst.

The wrong ones live here and are never registered: `random_eviction` keeps rows by lot, and `shuffled_positions` reads a
whole cache with every token at a position drawn by lot.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import combine, registry
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
    Written,
)
from sparsejax.storage import Storage

REFERENCE = registry.DEFAULT_METHOD
DEFAULTS = (registry.DEFAULT_METHOD, registry.DEFAULT_STORAGE)
PAGE_SIZE = 16
"""Tokens of a page for methods that ask for no size."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One line of the report.

    Attributes:
      label: family and budget.
      family: members joined by "+".
      budget: tokens kept, or read where nothing is evicted; None for all.
      spec: what a user would write; what is wrong with it for a control.
      shuffled: positions are drawn by lot.
      control: wrong on purpose.
    """

    label: str
    family: str
    budget: int | None
    spec: str
    method: Method
    storage: Storage
    shuffled: bool = False
    control: bool = False


def families() -> list[str]:
    """What is compared if nothing is said: every member of the registry but the reference, alone, retention first."""
    order = ("retention", "selection", "prefill", "storage")
    known = [entry for name, entry in registry.available().items() if name not in DEFAULTS and entry.axis in order]
    return [entry.name for entry in sorted(known, key=lambda entry: order.index(entry.axis))]


def usual(budgets: Sequence[int], chosen: Sequence[str]) -> list[Variant]:
    """Variants of each family for each budget, budgets outermost; where nothing has a size, its samples.

    Raises:
      MethodError: see `registry.sized` and `registry.resolve`.
    """
    entries = registry.available()
    sized = [name for name in chosen if name not in entries or entries[name].sized is not None]
    found = [parse(registry.sized(name, budget), budget) for budget in budgets for name in sized]
    for name in chosen:
        if name not in sized:
            found += [parse(registry.spec_of(entries[name], params)) for params in entries[name].samples]
    return found


def parse(spec: str, budget: int | None = None) -> Variant:
    """The variant of a composition that holds or reads `budget` tokens, if that is known.

    Raises:
      MethodError: see `registry.resolve`.
    """
    method, storage = registry.resolve(spec)
    default = registry.resolve(REFERENCE)[1]
    members = [member.name for member in method.members or (method,) if member.axis != "none"]
    members += [storage.name] if storage != default else []
    family = "+".join(members) or REFERENCE
    if budget is None:
        budgets = [getattr(member.params, "budget", None) for member in _by_axis(method)]
        budget = next((known for known in budgets if known is not None), None)
    return Variant(f"{family} {budget}" if budget else family, family, budget, spec, method, storage)


def told_apart(chosen: Sequence[Variant]) -> list[Variant]:
    """The same with unique labels: those that are not are followed by the knobs that not all of them share."""
    knobs = [re.findall(r"\w+=[^,()+]+", variant.spec) for variant in chosen]
    found = []
    for variant, own in zip(chosen, knobs, strict=True):
        alike = [other for other, v in zip(knobs, chosen, strict=True) if v.label == variant.label]
        apart = [knob for knob in own if not all(knob in other for other in alike)]
        found.append(dataclasses.replace(variant, label=" ".join([variant.label, *apart])))
    labels = [variant.label for variant in found]
    return [dataclasses.replace(v, label=v.spec) if labels.count(v.label) > 1 else v for v in found]


def _by_axis(method: Method) -> list[Method]:
    return sorted(_members(method), key=lambda member: member.axis != "retention")


@dataclasses.dataclass(frozen=True)
class Lot:
    """Keeps `budget` rows by lot after a prompt, and again after every `interval` decoded tokens."""

    budget: int
    interval: int


def random_eviction(budget: int) -> Method:
    """Keeps rows by lot, other ones in every layer, sinks and recent ones as likely as others."""

    def keep_count(params: Lot, phase: Any, lengths: np.ndarray) -> np.ndarray:
        limit = {"prompt": params.budget + 1, "token": params.budget + params.interval}.get(phase)
        return lengths if limit is None else np.where(lengths >= limit, params.budget, lengths)

    def keep_rows(params: Lot, context: EvictContext) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), context.layer), context.next_position)
        capacity = context.view.table.shape[-1] * context.geometry.page_size
        draws = jax.random.uniform(key, (capacity,))
        held = jnp.arange(capacity, dtype=jnp.int32) < context.length
        _, rows = jax.lax.top_k(jnp.where(held, draws, -1.0), context.kept)
        return jnp.sort(rows).astype(jnp.int32)[None]

    return Method(
        "random_eviction",
        "retention",
        Lot(budget, max(1, budget // 8)),
        summary="keep rows by lot",
        keep_rows=keep_rows,
        keep_count=keep_count,
    )


def controls(budgets: Sequence[int]) -> list[Variant]:
    """Methods that must lose."""
    dense, storage = registry.resolve(REFERENCE)
    found = [
        Variant(f"random eviction {n}", "random eviction", n, "rows kept by lot", random_eviction(n), storage)
        for n in budgets
    ]
    name, spec = "shuffled positions", "tokens decoded at positions drawn by lot"
    found.append(Variant(name, name, None, spec, dense, storage, shuffled=True))
    return [dataclasses.replace(variant, control=True) for variant in found]


def shuffle_positions(state: Any, rows: Sequence[int], window: int, rng: np.random.Generator) -> Any:
    """The state with the next positions of `rows` drawn from [0, window)."""
    drawn = rng.integers(0, window, len(rows)).astype(np.int32)
    return state.replace(positions=state.positions.at[jnp.asarray(rows)].set(drawn))


# Which variants can start from one prefill


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Members whose statistics a recorder keeps, one for each pair of hooks."""

    members: tuple[Method, ...]


def recorder(methods: Sequence[Method]) -> Method:
    """Dense attention that keeps every statistic that the methods keep until they evict, and replays prompts for them.

    Members with the same hooks are taken to fill their arrays alike until then, whatever their budgets; tests compare
    with the methods themselves. Hidden states are seen by the first member that asks for them.
    """
    found: dict[Any, Method] = {}
    for member in (member for method in methods for member in _members(method)):
        hooks = member.on_write, member.on_decoded, member.observe
        known = found.get(hooks)
        # Short prompts are not replayed: whoever replays the shortest ones does so for all.
        if any(hooks) and (known is None or _shortest_replay(member) < _shortest_replay(known)):
            found[hooks] = member
    members = tuple(found.values())
    observing = any(member.observe is not None for member in members)
    replaying = any(member.replays is not None for member in members)
    decoding = any(member.on_decoded is not None for member in members)
    hidden = any(member.on_hidden is not None for member in members)
    return Method(
        "recorder",
        "none",
        Recorded(members),
        granularity=_finest(methods),
        aux=_recorded_aux,
        on_write=_record_written,
        observe=_record_observed if observing else None,
        on_decoded=_record_decoded if decoding else None,
        on_hidden=_record_hidden if hidden else None,
        hidden_layer=_recorded_hidden_layer,
        private_rows=any(method.private_rows for method in methods),
        replays=_recorded_replays if replaying else None,
        replay_tokens=_recorded_replay_tokens if replaying else None,
    )


def _members(method: Method) -> tuple[Method, ...]:
    return method.members or (method,)


def _finest(methods: Sequence[Method]) -> Granularity:
    return max((method.granularity for method in methods), key=list(Granularity).index)


def _shortest_replay(member: Method) -> int:
    """Log2 of the shortest prompt that is replayed."""
    return next((power for power in range(24) if member.replay_lengths(1 << power)), 24)


def _recorded_aux(params: Recorded, geometry: Geometry) -> dict[str, AuxSpec]:
    return {name: spec for member in params.members for name, spec in member.aux_specs(geometry).items()}


def _record_written(
    params: Recorded, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written
) -> tuple[Aux, Aux]:
    for member in params.members:
        if member.on_write is not None:
            page_aux, row_aux = member.on_write(member.params, geometry, page_aux, row_aux, written)
    return page_aux, row_aux


def _record_decoded(params: Recorded, context: DecodedContext) -> Aux:
    for member in params.members:
        if member.on_decoded is not None:
            context = context._replace(row_aux=member.on_decoded(member.params, context))
    return context.row_aux


def _record_observed(params: Recorded, context: ObserveContext) -> tuple[Aux, Aux]:
    for member in params.members:
        if member.observe is not None:
            page_aux, row_aux = member.observe(member.params, context)
            context = context._replace(page_aux=page_aux, row_aux=row_aux)
    return context.page_aux, context.row_aux


def _seeing(params: Recorded) -> Method:
    return next(member for member in params.members if member.on_hidden is not None)


def _record_hidden(params: Recorded, context: HiddenContext) -> Aux:
    member = _seeing(params)
    assert member.on_hidden is not None
    return member.on_hidden(member.params, context)


def _recorded_hidden_layer(params: Recorded, num_layers: int) -> int:
    member = _seeing(params)
    return member.hidden_layer(member.params, num_layers)


def _replaying(params: Recorded) -> Method:
    return next(member for member in params.members if member.replays is not None)


def _recorded_replays(params: Recorded, prompt_tokens: int) -> tuple[int, ...]:
    return _replaying(params).replay_lengths(prompt_tokens)


def _recorded_replay_tokens(params: Recorded, prompt: np.ndarray, index: int) -> np.ndarray:
    return _replaying(params).replay_ids(prompt, index)


# When methods act


def own_prefill(method: Method, length: int, geometry: Geometry) -> str | None:
    """Why a prompt of the method is not that of dense attention followed by one eviction, or None."""
    if any(member.axis == "prefill" for member in _members(method)):
        return "its prefill differs from the dense one"
    for size in (*range(64, length, 64), length):
        lengths = np.full(geometry.table_shape(method.granularity), size, np.int32)
        if (method.kept_after("chunk", lengths) != lengths).any():
            return "it evicts between the chunks of a prompt"
    return None


def acts(method: Method, geometry: Geometry) -> str:
    """When rows first go, however few may stay: after a "prompt", or once it was read again in a "replay", or not
    before "decode" steps. Where none ever go, "prompt".
    """
    if method.replays is not None:
        return "replay"
    longest = np.full(geometry.table_shape(method.granularity), 1 << 24, np.int32)
    phases = [phase for phase in ("prompt", "token") if (method.kept_after(phase, longest) < longest).any()]
    return "decode" if phases == ["token"] else "prompt"


def first_eviction(method: Method, length: int, geometry: Geometry, most: int = 1024) -> int:
    """Tokens that are decoded after a prompt of `length` until rows go; 0 if none do within `most`."""
    for done in range(1, most + 1):
        lengths = np.full(geometry.table_shape(method.granularity), length + done, np.int32)
        if method.may_evict("token", done) and (method.kept_after("token", lengths) < lengths).any():
            return done
    return 0


@dataclasses.dataclass
class Pool:
    """Variants that share a device state and one prefill of each context, kept by `base`.

    Their rows have the granularity of `base`, the finest that one of them needs, which changes no result.
    """

    base: Method
    storage: Storage
    page_size: int
    variants: list[Variant]
    why_alone: str | None = None

    def methods(self) -> dict[str, Method]:
        """The variants' methods by label, as they are served here."""
        grain = self.base.granularity
        return {variant.label: combine.with_granularity(variant.method, grain) for variant in self.variants}


def pools(variants: Sequence[Variant], geometry_of: Any, length: int) -> list[Pool]:
    """Groups variants by what they can share: storage, page size, arrays of one shape, and what fills them.

    Those whose forks can't share pages are apart: they take more memory.

    Args:
      variants: the reference comes first.
      geometry_of: page size -> Geometry.
      length: longest prompt, in tokens.

    Raises:
      MethodError: a method can't serve the model, with the reasons.
    """
    groups: list[tuple[tuple, dict[str, Any], list[Variant], str | None]] = []
    for variant in variants:
        method = variant.method
        size = method.page_size(method.params) or PAGE_SIZE
        geometry = geometry_of(size)
        reasons = refusals(variant, geometry_of)
        if reasons:
            raise MethodError(f"{variant.spec}: " + "; ".join(reasons))
        kept, alone = _statistics(method, geometry), own_prefill(method, length, geometry)
        key = (variant.storage, size)
        for known, held, members, why in groups:
            fits = all(held.get(name, what) == what for name, what in kept.items())
            if alone is None and why is None and known == key and fits:
                held.update(kept)
                members.append(variant)
                break
        else:
            groups.append((key, dict(kept), [variant], alone))
    return [
        Pool(
            members[0].method if why else recorder([variant.method for variant in members]),
            *key[:2],
            members,
            why,
        )
        for key, _, members, why in groups
    ]


def refusals(variant: Variant, geometry_of: Any) -> list[str]:
    """Why a variant can't serve a model: see `pools`."""
    method = variant.method
    return method.check(method.params, geometry_of(method.page_size(method.params) or PAGE_SIZE))


def _statistics(method: Method, geometry: Geometry) -> dict[str, Any]:
    """The arrays that a method needs by name: their specs, and how they are filled where that is a choice."""
    found: dict[str, Any] = {}
    for member in _members(method):
        how = getattr(member.params, "scoring", None)
        if member.replays is not None:
            fields = dataclasses.fields(member.params)
            modes = [getattr(member.params, field.name) for field in fields if not field.metadata.get("unit")]
            how = (*modes, *member.replay_lengths(1 << 20))
        found |= {name: (spec, how) for name, spec in member.aux_specs(geometry).items()}
    return found
