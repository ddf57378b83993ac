"""Every value that a member must refuse raises before anything is allocated, and the message names the parameter."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.storages import fp8_kv
from tests.contracts.compositions import COMPOSITIONS

NOT_COUNTS = (-1, 1.5, True, "4", None)
NOT_WEIGHTS = (-0.1, float("nan"), float("inf"), True, "1", None)
NOT_SHARES = (1.1, *NOT_WEIGHTS)

TABLE = [
    *(("streamingllm", "sink_keep_tokens", value) for value in NOT_COUNTS),
    *(("streamingllm", "recent_keep_tokens", value) for value in (0, *NOT_COUNTS)),
    *(
        ("streamingllm", "streamingllm_decode_trigger_ratio", v)
        for v in (0.99, -1, float("nan"), float("inf"), True, "2")
    ),
    ("streamingllm", "decode_keep_tokens", 5),  # not one of its parameters
    ("streamingllm", "streamingllm_position_mode", "relative"),
    *(
        ("snapkv", name, value)
        for name in ("sink_keep_tokens", "recent_keep_tokens", "decode_keep_tokens")
        for value in NOT_COUNTS
    ),
    *(("snapkv", "observation_window_size", value) for value in (0, *NOT_COUNTS)),
    *(("snapkv", "decode_eviction_interval", value) for value in (0, *NOT_COUNTS)),
    *(("snapkv", "pool_kernel_size", value) for value in (0, 2, 8, *NOT_COUNTS)),
    ("snapkv", "pool_type", "min"),
    ("snapkv", "softmax_domain", "rows"),
    ("snapkv", "head_mode", "per_query_head"),
    ("snapkv", "sparse_prefill_score_mode", "entropy"),
    ("snapkv", "snapkv_decode_eviction", "yes"),
    ("snapkv", "snapkv_num_full_layers", 2),
    ("snapkv", "head_budgets", "ragged"),
    ("snapkv", "head_budgets", "adaptive"),  # without head_mode=per_kv_head
    *(
        (name, "head_budget_floor", value)
        for name in ("snapkv", "kvzip")
        for value in (-0.1, 1.5, float("nan"), True, "0.2", None)
    ),
    *(
        (name, "head_budget_ceiling", value)
        for name in ("snapkv", "kvzip")
        for value in (0.5, float("nan"), float("inf"), True, "2", None)
    ),
    *(
        ("pyramidkv", name, value)
        for name in ("sink_keep_tokens", "recent_keep_tokens", "decode_keep_tokens", "pyramidkv_start_layer")
        for value in NOT_COUNTS
    ),
    *(
        ("pyramidkv", name, value)
        for name in ("observation_window_size", "decode_eviction_interval", "pool_kernel_size", "pyramidkv_beta")
        for value in (0, *NOT_COUNTS)
    ),
    *(("pyramidkv", "pyramidkv_least_layer", value) for value in (-1, 1.5, True, "4")),
    *(
        ("pyramidkv", name, value)
        for name in ("pyramidkv_start_ratio", "pyramidkv_least_ratio", "pyramid_layer_ratios")
        for value in (0, 1.5, -0.5, float("nan"), True, "much")
    ),
    ("pyramidkv", "pool_kernel_size", 2),
    ("pyramidkv", "pool_type", "min"),
    ("pyramidkv", "softmax_domain", "rows"),
    ("pyramidkv", "head_mode", "per_query_head"),
    ("pyramidkv", "sparse_prefill_score_mode", "entropy"),
    ("pyramidkv", "pyramid_budget_mode", "geometric"),
    ("pyramidkv", "pyramid_layer_ratios", (0.5, 2)),
    ("pyramidkv", "pyramid_layer_ratios", ()),
    *(
        ("kvzip", name, value)
        for name in ("kvzip_token_budget", "kvzip_score_chunk_size")
        for value in (0, *NOT_COUNTS)
    ),
    *(
        ("kvzip", name, value)
        for name in ("kvzip_prev_postfix_size", "kvzip_protect_sink", "kvzip_protect_recent")
        for value in NOT_COUNTS
    ),
    ("kvzip", "kvzip_protect_sink", 4097),  # more than the budget
    ("kvzip", "kvzip_protect_recent", 4097),
    ("kvzip", "kvzip_variant", "per_token"),
    ("kvzip", "kvzip_query_reduction", "sum"),
    ("kvzip", "sink_keep_tokens", 4),  # its protected rows have names of their own
    *(
        ("omnikv_prefill", f"omnikv_prefill_{name}_tokens", value)
        for name in ("keep", "sink_keep", "recent_keep")
        for value in NOT_COUNTS
    ),
    *(
        ("omnikv_prefill", "omnikv_prefill_full_attention_layers", value)
        for value in (1, (), (1, 2), (0, 1, 1), (0, -1), (0, 1.5), (0, True), None, "first", "0,-1", "")
    ),
    *(("quest", "quest_chunk_size", value) for value in (0, *NOT_COUNTS)),
    *(("quest", "quest_skip_layers", value) for value in NOT_COUNTS),
    *(
        ("quest", name, value)
        for name in ("sink_keep_tokens", "recent_keep_tokens", "decode_keep_tokens")
        for value in NOT_COUNTS
    ),
    *(
        (member, name, value)
        for member in ("h2o", "h2o_prefill")
        for name in ("h2o_prefill_budget", "h2o_decode_budget")
        for value in (0, *NOT_COUNTS)
    ),
    ("h2o", "h2o_prefill_budget", 4095),  # less than what is kept in the end
    ("h2o_prefill", "h2o_prefill_budget", 4095),
    ("h2o", "h2o_decode_budget", 8193),
    *(("h2o", "h2o_prefill_score_window", value) for value in NOT_COUNTS),
    *(("h2o", "h2o_recent_ratio", value) for value in (0.0, 1.0, 1, -0.5, float("nan"), True, "half", None)),
    *(("h2o", "h2o_decode_eviction_interval", value) for value in (0, *NOT_COUNTS)),
    ("h2o", "h2o_decode_eviction", "yes"),
    ("h2o_prefill", "h2o_decode_eviction", True),  # not without the retention method
    ("h2o", "h2o_prefill_compaction", "yes"),
    ("h2o", "h2o_logit_scale", "layer"),
    ("h2o", "h2o_head_reduction", "max"),
    ("h2o", "head_mode", "per_query_head"),
    ("h2o_prefill", "sparse_prefill_score_mode", "entropy"),
    ("quest", "quest_select_scope", "per_head"),
    ("quest", "quest_token_budget", 1024),
    *(
        ("rkv", name, value)
        for name in ("sink_keep_tokens", "recent_keep_tokens", "decode_keep_tokens")
        for value in NOT_COUNTS
    ),
    *(("rkv", "rkv_compression_interval", value) for value in (0, 7, *NOT_COUNTS)),  # 7 < rkv_observation_tokens
    *(("rkv", "rkv_observation_tokens", value) for value in (0, 129, *NOT_COUNTS)),
    *(("rkv", "rkv_alpha", value) for value in NOT_SHARES),
    *(("rkv", "rkv_kernel_size", value) for value in (0, 2, 8, *NOT_COUNTS)),
    *(("rkv", "rkv_score_chunk_mb", value) for value in (0, *NOT_COUNTS)),
    ("rkv", "rkv_scope", "shared"),
    ("rkv", "rkv_compress_prompt", "yes"),
    *(("rkv", "rkv_similarity_threshold", value) for value in (0.6, 0, True, "0.5", None)),
    *(("rkv", "rkv_recent_similar_keep", value) for value in (0, 2, True, "1", None)),
    *(("rkv", "rkv_redundancy_window", value) for value in (1, False, "0", None)),
    *(("rkv", "rkv_max_redundancy_tokens", value) for value in (0, 4096, False)),
    *(
        ("skipkv", name, value)
        for name in ("sink_keep_tokens", "recent_keep_tokens", "decode_keep_tokens")
        for value in NOT_COUNTS
    ),
    *(
        ("skipkv", name, value)
        for name in (
            "skipkv_compression_interval",
            "skipkv_observation_tokens",
            "skipkv_kernel_size",
            "skipkv_sentence_min_tokens",
            "skipkv_sentence_max_tokens",
            "skipkv_max_tracked_sentences",
            "skipkv_redundancy_window",
            "skipkv_max_redundancy_tokens",
            "skipkv_segment_size",
        )
        for value in (0, *NOT_COUNTS)
    ),
    ("skipkv", "recent_keep_tokens", 7),  # below skipkv_observation_tokens
    ("skipkv", "skipkv_observation_tokens", 129),  # above skipkv_compression_interval
    ("skipkv", "skipkv_kernel_size", 4),
    ("skipkv", "skipkv_sentence_max_tokens", 3),  # below skipkv_sentence_min_tokens
    ("skipkv", "skipkv_redundancy_window", 4097),  # above skipkv_max_redundancy_tokens
    *(("skipkv", "skipkv_sentence_embedding_layer", value) for value in (-2, 1.5, True, "4", None)),
    *(("skipkv", name, v) for name in ("skipkv_mix_lambda", "skipkv_similarity_threshold") for v in NOT_SHARES),
    *(("skipkv", name, v) for name in ("skipkv_alpha", "skipkv_sentence_score_weight") for v in NOT_WEIGHTS),
    ("skipkv", "skipkv_importance", "last"),
    ("skipkv", "head_mode", "per_query_head"),
    ("skipkv", "skipkv_enable_sentence_scoring", "yes"),
    *(("skipkv", "skipkv_enable_activation_steering", value) for value in (True, "yes", None)),
    ("skipkv", "skipkv_steering_alpha", -1.25),  # not one of its parameters
    *(("skipkv", "skipkv_delimiter_ids", value) for value in (-1, 1.5, True, None, "4;x", (3, -1), (2.5,))),
    ("fp8_kv", "fp8_kv_scale_mode", "e5m2"),
    ("fp8_kv", "fp8_kv_scale_path", "scales.json"),  # read with a static mode only
]


@pytest.mark.parametrize(("member", "knob", "value"), TABLE)
def test_refused(member, knob, value):
    with pytest.raises(MethodError, match=knob):
        registry.resolve(member, {knob: value})
    if not isinstance(value, (bool, type(None), float)):
        with pytest.raises(MethodError, match=knob):
            registry.resolve(
                f"{member}({knob}={value})" if not isinstance(value, str) else f"{member}({knob}=x-{value})"
            )


@pytest.mark.parametrize("member", ["snapkv", "pyramidkv", "quest"])
def test_a_budget_of_nothing_is_refused(member):
    nothing = {"sink_keep_tokens": 0, "decode_keep_tokens": 0, "recent_keep_tokens": 0}
    with pytest.raises(MethodError, match="decode_keep_tokens"):
        registry.resolve(member, nothing)


def test_attention_mass_is_added_up_over_at_most_128_queries():
    for member in ("h2o", "h2o_prefill"):
        registry.resolve(member, {"h2o_prefill_score_window": 129})
        mass = {"sparse_prefill_score_mode": "probability"}
        registry.resolve(member, mass | {"h2o_prefill_score_window": 128})
        with pytest.raises(MethodError, match="h2o_prefill_score_window"):
            registry.resolve(member, mass | {"h2o_prefill_score_window": 129})


def test_a_budget_that_the_voting_rows_fill_is_refused():
    budget = {"sink_keep_tokens": 2, "decode_keep_tokens": 3, "recent_keep_tokens": 3}
    with pytest.raises(MethodError, match=r"decode_keep_tokens.*rkv_observation_tokens"):
        registry.resolve("rkv", budget)
    registry.resolve("rkv", budget | {"rkv_observation_tokens": 7})


def test_what_joins_heads_cannot_choose_per_head():
    with pytest.raises(MethodError, match=r"head_mode.*skipkv_importance"):
        registry.resolve("skipkv", {"head_mode": "per_kv_head", "skipkv_importance": "step"})


def test_a_workspace_that_is_too_small_is_refused():
    method, _ = registry.resolve("rkv", {"rkv_score_chunk_mb": 1})
    geometry = Geometry(2, 32, 8, 128, 16, 32768, 1.0)
    (reason,) = method.check(method.params, geometry)
    assert "rkv_score_chunk_mb" in reason
    assert "32768" in reason
    assert not registry.resolve("rkv")[0].check(registry.resolve("rkv")[0].params, geometry)
    # Nothing is scored, nor kept, where no request can grow long enough.
    short = dataclasses.replace(geometry, max_model_len=4799)
    assert not method.check(method.params, short)
    assert not method.aux_specs(short)
    assert method.aux_specs(dataclasses.replace(geometry, max_model_len=4800))


def test_a_layer_that_the_model_lacks_is_refused():
    method, _ = registry.resolve("skipkv", {"skipkv_sentence_embedding_layer": 2})
    (reason,) = method.check(method.params, Geometry(2, 4, 2, 8, 4, 64, 1.0))
    assert "skipkv_sentence_embedding_layer" in reason
    assert not method.check(method.params, Geometry(3, 4, 2, 8, 4, 64, 1.0))


def test_heads_share_the_rows_of_prompts_only():
    knobs = {"head_budgets": "adaptive", "head_mode": "per_kv_head"}
    registry.resolve("snapkv", knobs)
    with pytest.raises(MethodError, match="snapkv_decode_eviction"):
        registry.resolve("snapkv", {**knobs, "snapkv_decode_eviction": True})


@pytest.mark.parametrize("mode", ["static", "static_head"])
def test_static_scales_need_a_file(mode, tmp_path):
    with pytest.raises(MethodError, match="fp8_kv_scale_path"):
        registry.resolve("fp8_kv", {"fp8_kv_scale_mode": mode})
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(MethodError, match="fp8_kv_scale_path"):
            registry.resolve("fp8_kv", {"fp8_kv_scale_mode": mode, "fp8_kv_scale_path": str(path)})


def good_file(mode: str) -> dict:
    scales = [([0.5, 0.25], [1.0, 2.0]), ([0.125, 0.25], [1.0, 0.5])]
    return fp8_kv.scale_file(scales, mode, "model", "hash")


DAMAGE = [
    ("schema_version", lambda data: data.update(schema_version=2)),
    ("schema_version", lambda data: data.pop("schema_version")),
    ("scheme", lambda data: data.update(scheme="fp8_e5m2_per_layer")),
    ("scale_convention", lambda data: data.update(scale_convention="quant_multiplier")),
    ("layers", lambda data: data.pop("layers")),
    ("layers", lambda data: data["layers"].pop("0")),
    ("layers", lambda data: data["layers"].update(extra={"k": 1.0, "v": 1.0})),
    ("layers.1.v", lambda data: data["layers"]["1"].pop("v")),
    ("layers.0", lambda data: data["layers"].update({"0": 3.0})),
]
for bad in (0, 0.0, -1.0, float("nan"), float("inf"), True, "0.5", None):
    DAMAGE.append(("layers.0.k", lambda data, bad=bad: data["layers"]["0"].update(k=bad)))
    DAMAGE.append(("layers.0.k", lambda data, bad=bad: data["layers"]["0"].update(k=[0.5, bad])))


@pytest.mark.parametrize("mode", ["static", "static_head"])
@pytest.mark.parametrize(("word", "damage"), DAMAGE)
def test_a_damaged_scale_file_is_refused(mode, word, damage, tmp_path):
    path = tmp_path / "scales.json"
    data = good_file(mode)
    path.write_text(json.dumps(data))
    assert fp8_kv.read_scales(str(path), mode).checkpoint_id == "model"
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(MethodError, match=f"fp8_kv_scale_path.*{word}"):
        fp8_kv.read_scales(str(path), mode)


@pytest.mark.parametrize("text", ["", "[]", "3", '"text"', "{", "\xff"])
def test_a_file_that_is_no_scale_file_is_refused(text, tmp_path):
    path = tmp_path / "scales.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(MethodError, match="fp8_kv_scale_path"):
        fp8_kv.read_scales(str(path), "static")


def test_scales_of_another_model_are_refused(tmp_path):
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(good_file("static_head")))
    storage = fp8_kv.build(fp8_kv.Params("static_head", str(path)))

    def reasons(layers=2, heads=2, checkpoint="model", digest="hash"):
        return storage.check(storage.params, Geometry(layers, 4, heads, 8, 4, 64, 1.0), checkpoint, digest)

    assert reasons() == []
    for changed, word in (
        ({"layers": 3}, "layers"),
        ({"heads": 4}, "heads"),
        ({"checkpoint": "other"}, "checkpoint"),
        ({"digest": "other"}, "configuration"),
    ):
        found = reasons(**changed)
        assert len(found) == 1, found
        assert word in found[0]


@pytest.mark.parametrize(
    ("composition", "words"),
    [
        ("snapkv+streamingllm", ["snapkv", "streamingllm", "retention"]),
        ("fp8_kv+plain", ["fp8_kv", "plain"]),
        ("snapvk", ["snapvk", "snapkv"]),
        ("snapkv+h2o_prefill", ["h2o_prefill", "accumulates", "snapkv"]),
        ("quest+h2o_prefill", ["h2o_prefill", "accumulates", "quest"]),
        ("h2o(h2o_logit_scale=none)+h2o_prefill", ["h2o", "h2o_prefill", "h2o_logit_scale"]),
        ("h2o+h2o_prefill(h2o_prefill_budget=4095,h2o_decode_budget=1)", ["h2o_prefill_budget", "h2o keeps (4096)"]),
        ("h2o+snapkv", ["h2o", "snapkv", "retention"]),
        ("quest+nothing-known", ["nothing-known"]),
        ("quest(quest_chunk_size)", ["quest_chunk_size"]),
        ("quest)", ["quest"]),
        ("", [""]),
    ],
)
def test_compositions_that_make_no_sense_are_refused(composition, words):
    with pytest.raises(MethodError) as caught:
        registry.resolve(composition)
    assert all(word in str(caught.value) for word in words), caught.value


def test_unused_parameters_are_refused():
    with pytest.raises(MethodError, match=r"quest_chunk_size.*belongs to quest"):
        registry.resolve("snapkv", {"quest_chunk_size": 4})
    with pytest.raises(MethodError, match=r"nonsense.*no method has it"):
        registry.resolve("snapkv", {"nonsense": 4})


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_what_is_found_is_complete(name):
    method, storage = registry.resolve(name)
    for member in method.members or (method,):
        assert member.summary
        assert member.paper or member.axis == "none"
    assert storage.summary


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8", ""])
def test_unknown_cache_dtypes_are_refused(dtype):
    with pytest.raises(MethodError, match="kv-cache-dtype"):
        registry.storage_for_dtype(dtype)
