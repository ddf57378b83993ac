"""Where the time of a decode step goes: the whole step beside its parts, each compiled on its own.

    python -m benchmarks.decode_parts --batches 1 16 --context 256

Parts: the layers' matrix products with norms and RoPE but without attention, the logits, attention over the cache in
all layers, and sampling; what is left are KV writes, page tables, and the host. Apart, parts miss each other's fusions,
so the rest is a difference, not a measurement. The floor is the time to read every weight once, at the bandwidth that a
plain sum over as many bytes reaches in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common, quiet

PARTS = ("layers", "logits", "attention", "sampling")


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sides(model: Any, method_name: str, batch: int, context: int) -> dict[str, Callable[[], float]]:
    """The whole step, its parts and the floor: calls that wait for the device and return seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.sparse_decode import fill, rewind
    from sparsejax import registry
    from sparsejax.models.registry import get_architecture
    from sparsejax.models.spec import Stream
    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.heads import Heads, finish
    from sparsejax.plans import DecodeRow, SamplingRow
    from sparsejax.runner import DeviceRunner
    from sparsejax.sampling import FLOAT_COLUMNS, INT_COLUMNS, RowBias, SamplingInputs, logprobs, sample
    from sparsejax.state import POSITIONS, layer_view

    method, storage = registry.resolve(method_name)
    spec, weights = model.spec, model.weights
    geometry = spec.geometry(method.page_size(method.params) or 16, context + 64)
    runner = DeviceRunner(
        spec,
        weights,
        geometry,
        {method_name: method},
        storage,
        num_rows=batch,
        num_sequence_pages=1 + batch * geometry.max_pages,
        decode_buckets=(batch,),
        prefill_buckets=((1, 16),),
    )
    fill(runner, [method], storage, batch, context)
    architecture = get_architecture(spec.architecture)
    rows = [DecodeRow(i + 1, SamplingRow(), None, 1 + i) for i in range(batch)]

    def whole() -> float:
        rewind(runner, context, context)
        return timed(lambda: runner.decode(method_name, rows).result())

    @jax.jit
    def layers(weights: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
        def attend(heads: Heads) -> jax.Array:
            q, k, v = finish(heads)
            return q + jnp.repeat(k + v, geometry.group_size, 1)  # nothing may be optimised away

        stream = Stream(x, jnp.zeros_like(x))
        for layer in weights["layers"]:
            stream = architecture.layer(spec, layer, stream, positions, attend)
        return stream.x + stream.delta

    @jax.jit
    def attention(state: Any, q: jax.Array, ids: jax.Array) -> jax.Array:
        (name,) = state.tables
        names = tuple(pool for pool in state.pools if pool != POSITIONS)
        for layer in range(spec.num_layers):
            table, lengths = state.tables[name][:, :, ids], state.lengths[name][:, :, ids]
            view = layer_view(geometry, method.granularity, table, lengths, jnp.int32(layer))

            def load_tile(tiles: Any, layer: jax.Array) -> Any:
                return storage.load_tile(storage.params, geometry, tiles, layer)

            q, _ = api.decode_attention(
                q, state.pools, names, view, load_tile=load_tile, layer=jnp.int32(layer), scale=geometry.scale
            )
        return q

    @jax.jit
    def sampling(state: Any, logits: jax.Array, ids: jax.Array, ints: jax.Array, floats: jax.Array) -> Any:
        inputs = SamplingInputs.unpack(ints, floats)
        bias = RowBias(state.counts[ids], state.bias_ids[ids], state.bias_values[ids], state.stop_ids[ids])
        tokens = sample(logits, inputs, lambda: bias)
        return tokens, logprobs(logits, tokens, inputs)

    ints = np.zeros((batch, len(INT_COLUMNS)), np.int32)
    ints[:, INT_COLUMNS.index("logprobs")] = -1
    floats = np.ones((batch, len(FLOAT_COLUMNS)), np.float32)
    dtype = jnp.dtype(spec.dtype)
    x = jnp.ones((batch, spec.hidden_size), dtype)
    q = jnp.ones((batch, spec.num_q_heads, spec.head_dim), dtype)
    ids = jnp.arange(1, batch + 1, dtype=jnp.int32)
    positions = jnp.full(batch, context, jnp.int32)
    logits = jnp.zeros((batch, spec.vocab_size), jnp.float32)
    head = jax.jit(lambda weights, x: architecture.logits(spec, weights, Stream(x, jnp.zeros_like(x))))
    total = jax.jit(lambda weights: sum(leaf.sum(dtype=jnp.float32) for leaf in jax.tree.leaves(weights)))
    calls = {
        "layers": lambda: layers(weights, x, positions),
        "logits": lambda: head(weights, x),
        "attention": lambda: attention(runner.state, q, ids),
        "sampling": lambda: sampling(runner.state, logits, ids, ints, floats),
        "floor": lambda: total(weights),
    }
    waiting = {name: lambda call=call: timed(lambda: jax.block_until_ready(call())) for name, call in calls.items()}
    return {"whole": whole, **waiting}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("decode_parts", __doc__.splitlines()[0])
    parser.add_argument("--model", help="as for sparsejax")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--sparse-method", default="dense")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache of each row")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args(argv)
    run = common.Run("decode_parts", arguments)
    result, facts = measure(arguments)
    run.finish(result, **facts)
    return 0


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    import jax

    from sparsejax.arrays import tree_nbytes
    from sparsejax.models.load import load_model
    from sparsejax.models.registry import get_architecture

    common.use_compilation_cache()
    model = load_model(arguments.model, load_format=arguments.load_format)
    weight_bytes = tree_nbytes(get_architecture(model.spec.architecture).weight_specs(model.spec))
    result, rows = {}, []
    for batch in arguments.batches:
        calls = sides(model, arguments.sparse_method, batch, arguments.context)
        for call in calls.values():
            call()
            call()
        rounds = quiet.alternate(calls, arguments.rounds, patience_s=arguments.patience_s)
        found = rounds.found
        median = {name: common.summary(times)["median"] for name, times in found.items()}
        rest = median["whole"] - sum(median[name] for name in PARTS)
        result[str(batch)] = {
            **{name: common.summary(times) for name, times in found.items()},
            "rest_s": rest,
            "quiet": rounds.facts,
            "over_floor": common.ratio(found["whole"], found["floor"]),
            "floor_bytes_per_s": weight_bytes / median["floor"],
        }
        cells = [f"{median[name] * 1e3:.2f}" for name in ("whole", *PARTS)]
        rows.append((batch, *cells, f"{rest * 1e3:.2f}", f"{median['floor'] * 1e3:.2f}"))
        del calls
        jax.clear_caches()
    what = f"{model.name}, {model.spec.dtype}, {arguments.sparse_method}"
    print(f"{what}, {arguments.context} tokens of context; milliseconds, median")
    print(common.table(("rows", "whole", *PARTS, "rest", "floor"), rows))
    return result, {
        **common.device_facts(),
        "model": model.name,
        "dtype": model.spec.dtype,
        "weight_bytes": weight_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
