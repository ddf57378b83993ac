"""Which implementation serves a call, and what is said about it. Runs anywhere."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry
from sparsejax.pallas_kernels import api, choice, payload, triton_support
from sparsejax.pallas_kernels.decode_attention import triton_gpu as decode_triton
from sparsejax.pallas_kernels.layout import PageView
from tests.contracts.kernels_gpu.cases import Shape, make, relative_error

GEOMETRY = Geometry(2, 8, 2, 64, 16, 256, 0.125, "bfloat16")


def stored(storage_spec: str, geometry: Geometry = GEOMETRY):
    """Query, pools, names, view and load_tile as shapes, for a storage of the registry."""
    storage = registry.resolve(storage_spec)[1]
    specs = storage.payload(storage.params, geometry)
    pools = {name: jax.ShapeDtypeStruct((40, *spec.shape), jnp.dtype(spec.dtype)) for name, spec in specs.items()}
    q = jax.ShapeDtypeStruct((3, geometry.num_q_heads, geometry.head_dim), jnp.dtype(geometry.dtype))
    table = jax.ShapeDtypeStruct((3, 1, 16), jnp.int32)
    offset = jax.ShapeDtypeStruct((geometry.num_kv_heads,), jnp.int32)
    view = PageView(table, 4, offset, jax.ShapeDtypeStruct((3, 1), jnp.int32))  # type: ignore[arg-type]
    return q, pools, tuple(pools), view, functools.partial(storage.load_tile, storage.params, geometry)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("spec", "layout"), [("plain", payload.PLAIN), ("fp8_kv", payload.ROW_SCALED)])
def test_layouts_of_the_storages_are_recognised(spec, layout, dtype):
    geometry = Geometry(2, 8, 2, 64, 16, 256, 0.125, dtype)
    q, pools, names, _, load_tile = stored(spec, geometry)
    assert payload.recognise(load_tile, pools, names, q.dtype) == layout


def test_a_storage_that_decodes_otherwise_is_not_recognised():
    q, pools, names, _, load_tile = stored("plain")

    def doubled(tiles, layer):
        k, v = load_tile(tiles, layer)
        return k * 2, v

    def swapped(tiles, layer):
        return tiles["v"], tiles["k"]

    def by_layer(tiles, layer):
        return tiles["k"] + layer.astype(tiles["k"].dtype), tiles["v"]

    for other in (doubled, swapped, by_layer):
        assert payload.recognise(other, pools, names, q.dtype) is None
    assert payload.recognise(load_tile, pools, names, jnp.dtype("float32")) is None
    q, pools, names, _, load_tile = stored("fp8_kv(fp8_kv_scale_mode=unit)")
    assert payload.recognise(load_tile, pools, names, q.dtype) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 96}, "head_dim is 96, not one of 64, 128, 256"),
        ({"num_q_heads": 256}, "128 query heads share a KV head, more than 64"),
    ],
)
def test_shapes_without_a_kernel_say_why(change, reason):
    fields = {"num_q_heads": 8, "head_dim": 64} | change
    geometry = Geometry(2, fields["num_q_heads"], 2, fields["head_dim"], 16, 256, 0.125, "bfloat16")
    assert decode_triton.unsupported_shape(*stored("plain", geometry)) == reason


def test_supported_shapes_have_no_reason():
    assert decode_triton.unsupported_shape(*stored("plain")) is None


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="tells what happens without a GPU")
class TestWithoutGpu:
    case = staticmethod(lambda: make(Shape((20, 3), heads=2, group=2, dim=64, page=16, dtype="float32"), poison=0.0))

    def test_the_portable_path_serves_and_says_why(self, caplog, monkeypatch):
        monkeypatch.setattr(choice, "_chosen", {})
        case = self.case()
        with caplog.at_level(logging.INFO, "sparsejax.kernels"):
            for _ in range(2):
                out, _ = api.decode_attention(*case.arguments, **case.how)
        assert relative_error(out, case.wanted()[0]) < 1e-5
        reasons = "triton: needs an NVIDIA GPU, JAX runs on cpu; mosaic_tpu: needs a TPU, JAX runs on cpu"
        assert caplog.messages == [f"decode_attention: xla ({reasons})"]
        assert api.chosen() == {"decode_attention": ("xla",)}

    @pytest.mark.parametrize(
        "wanted", ["triton", "decode_attention=triton", "page_scores=xla, decode_attention=triton"]
    )
    def test_what_cannot_be_had_is_an_error(self, wanted):
        case = self.case()
        with pytest.raises(ValueError, match="decode_attention can't use implementation 'triton': needs an NVIDIA GPU"):
            api.decode_attention(*case.arguments, **case.how, implementation=wanted)

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            ("mosaic", "no implementation 'mosaic'; known: auto, mosaic_gpu, mosaic_tpu, triton, xla"),
            ("decode_attention=mosaic_gpu", "decode_attention has no implementation 'mosaic_gpu'; known: mosaic_tpu,"),
            ("attention=xla", "unknown operation 'attention'"),
        ],
    )
    def test_unknown_names(self, wanted, message):
        case = self.case()
        with pytest.raises(ValueError, match=message):
            api.decode_attention(*case.arguments, **case.how, implementation=wanted)

    @pytest.mark.parametrize("wanted", [None, "auto", "xla", "page_scores=triton", "decode_attention=xla"])
    def test_other_requests_are_served(self, wanted):
        case = self.case()
        out, _ = api.decode_attention(*case.arguments, **case.how, implementation=wanted)
        assert np.isfinite(np.asarray(out)).all()

    def test_expected(self):
        assert api.expected() == dict.fromkeys(api.IMPLEMENTATIONS, "xla")
        assert api.expected("xla") == dict.fromkeys(api.IMPLEMENTATIONS, "xla")
        with pytest.raises(api.UnavailableError, match="can't use implementation 'triton': needs an NVIDIA GPU"):
            api.expected("decode_attention=triton")

    def test_a_bare_name_counts_where_it_exists(self):
        """ "mosaic_gpu" says nothing about decode attention, which has no such implementation."""
        case = self.case()
        api.decode_attention(*case.arguments, **case.how, implementation="mosaic_gpu")
        with pytest.raises(api.UnavailableError, match="prefill_attention can't use implementation 'mosaic_gpu'"):
            api.expected("mosaic_gpu")


def test_what_cannot_be_imported_is_a_reason(monkeypatch):
    def refuse(name):
        raise ImportError(f"no {name}")

    triton_support.import_problem.cache_clear()
    monkeypatch.setattr(triton_support.importlib, "import_module", refuse)
    problem = triton_support.import_problem()
    triton_support.import_problem.cache_clear()
    assert problem == "jax-triton is not usable (ImportError: no jax_triton); install sparsejax[gpu]"


@pytest.mark.parametrize(("number", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_power_of_two(number, power):
    assert triton_support.power_of_two(number) == power


@pytest.mark.parametrize("rows", [1, 8, 100, 128, 384, 512, 520, 1000, 1024, 5000])
def test_rows_are_shared_out_evenly_where_that_leaves_few_cores_idle(rows):
    asked, spare = 396, 132
    programs = decode_triton.cut_at_rows(asked, rows, spare)
    assert 0.9 * asked <= programs <= asked + spare
    rows_each = -(-rows // programs)
    even = programs % rows == 0 or rows_each * (programs - 1) < rows <= rows_each * programs
    assert even or programs == asked


def test_programs_of_batches_that_are_powers_of_two():
    """8 KV heads each: one row in several programs, or several rows in one."""
    found = {batch: decode_triton.cut_at_rows(396, 8 * batch, 132) for batch in (1, 16, 64, 128)}
    assert found == {1: 392, 16: 384, 64: 512, 128: 396}
