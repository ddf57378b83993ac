"""What is compared: compositions of the registry, and deliberately wrong ones that must come out worst.

The wrong ones live here and are never registered: `random_eviction` keeps rows by lot, and `shuffled_positions` reads a
whole cache with every token at a position drawn by lot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import Aux, AuxSpec, EvictContext, Method, Written
from sparsejax.storage import Storage

REFERENCE = "dense"
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


def parse(spec: str) -> Variant:
    """The variant of a composition.

    Raises:
      MethodError: see `registry.resolve`.
    """
    method, storage = registry.resolve(spec)
    default = registry.resolve(REFERENCE)[1]
    members = [member.name for member in method.members or (method,) if member.axis != "none"]
    members += [storage.name] if storage != default else []
    family = "+".join(members) or REFERENCE
    budgets = [getattr(member.params, "budget", None) for member in _by_axis(method)]
    budget = next((budget for budget in budgets if budget is not None), None)
    return Variant(f"{family} {budget}" if budget else family, family, budget, spec, method, storage)


def _by_axis(method: Method) -> list[Method]:
    return sorted(method.members or (method,), key=lambda member: member.axis != "retention")


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
    """Members whose statistics a recorder keeps, one for each set of arrays."""

    members: tuple[Method, ...]


def recorder(methods: Sequence[Method]) -> Method:
    """Dense attention that keeps every statistic that the methods keep while a prompt is read.

    Members that declare the same arrays are taken to fill them alike while a prompt is read, whatever their budgets;
    tests compare with prefills by the methods themselves.
    """
    found: dict[Any, Method] = {}
    for method in methods:
        for member in method.members or (method,):
            if member.on_write is not None:
                found.setdefault(member.on_write, member)

    def aux(params: Recorded, geometry: Geometry) -> dict[str, AuxSpec]:
        return {name: spec for member in params.members for name, spec in member.aux_specs(geometry).items()}

    def on_write(
        params: Recorded, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written
    ) -> tuple[Aux, Aux]:
        for member in params.members:
            if member.on_write is not None:
                page_aux, row_aux = member.on_write(member.params, geometry, page_aux, row_aux, written)
        return page_aux, row_aux

    granularity = methods[0].granularity
    return Method(
        "recorder", "none", Recorded(tuple(found.values())), granularity=granularity, aux=aux, on_write=on_write
    )


def own_prefill(method: Method, length: int) -> str | None:
    """Why a prompt of the method is not that of dense attention followed by one eviction, or None."""
    if any(member.axis == "prefill" for member in method.members or (method,)):
        return "its prefill differs from the dense one"
    lengths = np.arange(1, length + 1, dtype=np.int32)
    if (method.kept_after("chunk", lengths) != lengths).any():
        return "it evicts between the chunks of a prompt"
    return None


@dataclasses.dataclass
class Pool:
    """Variants that share a device state and one prefill of each context, kept by `base`."""

    base: Method
    storage: Storage
    page_size: int
    variants: list[Variant]
    why_alone: str | None = None


def pools(variants: Sequence[Variant], geometry_of: Any, length: int) -> list[Pool]:
    """Groups variants by what they can share: storage, page size, granularity, and arrays of one shape.

    Args:
      variants: the reference comes first.
      geometry_of: page size -> Geometry.
      length: longest prompt, in tokens.

    Raises:
      MethodError: a method can't serve the model, with the reasons.
    """
    groups: list[tuple[tuple, dict[str, AuxSpec], list[Variant], str | None]] = []
    for variant in variants:
        method = variant.method
        size = method.page_size(method.params) or PAGE_SIZE
        geometry = geometry_of(size)
        reasons = method.check(method.params, geometry)
        if reasons:
            raise MethodError(f"{variant.spec}: " + "; ".join(reasons))
        specs, alone = method.aux_specs(geometry), own_prefill(method, length)
        key = (variant.storage, size, method.granularity)
        for known, held, members, why in groups:
            fits = all(held.get(name, spec) == spec for name, spec in specs.items())
            if alone is None and why is None and known == key and fits:
                held.update(specs)
                members.append(variant)
                break
        else:
            groups.append((key, dict(specs), [variant], alone))
    return [
        Pool(
            members[0].method if why else recorder([variant.method for variant in members]),
            key[0],
            key[1],
            members,
            why,
        )
        for key, _, members, why in groups
    ]
