"""The same rows as kvpress 0.5.5 keeps of five prompts in SmolLM2-135M-Instruct, float32 (README.md).

A row may differ only where the golden data say that its score is as good as the last kept row's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.geometry import Geometry
from sparsejax.methods import kvzip
from sparsejax.models.load import LoadedModel, load_model
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.heads import finish
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.state import POSITIONS
from tests.core.harness import Session
from tests.core.paging import paged, plain_storage
from tests.models.full_attention import dense_attention

GOLDEN = dict(np.load(pathlib.Path(__file__).parent / "kvpress.npz"))
SETTINGS = json.loads(str(GOLDEN["settings"]))
QUICK = SETTINGS["prompts"][0]  # `pytest -m slow` takes the others, too
SLOW = pytest.mark.slow
PROMPTS = [pytest.param(prompt, marks=[] if prompt == QUICK else SLOW) for prompt in SETTINGS["prompts"]]
MAX_LEN = 640  # tokens; one padded shape for all prompts
CHUNK = 160
VOTES = (
    "observation_window_size={window},softmax_domain=all,pool_type=avg,head_mode=per_kv_head,"
    f"pool_kernel_size={SETTINGS['kernel']},sparse_prefill_score_mode=probability"
)
SNAPKV = "snapkv(sink_keep_tokens=0,decode_keep_tokens={keep},recent_keep_tokens={window}," + VOTES + ")"
PYRAMIDKV = SNAPKV.replace("snapkv(", "pyramidkv(pyramid_layer_ratios={ratios},")
H2O = (
    "h2o(h2o_decode_budget={budget},h2o_recent_ratio={ratio},h2o_prefill_score_window=0,h2o_head_reduction=sum,"
    "sparse_prefill_score_mode=probability,head_mode=per_kv_head,h2o_prefill_compaction=false)"
)
KVZIP = (
    "kvzip(kvzip_variant=per_head_uniform,kvzip_token_budget={budget},kvzip_score_chunk_size={chunk},"
    "kvzip_protect_sink={sink})"
).format(**SETTINGS["kvzip"])


def compositions() -> dict[str, str]:
    """The members with the presses' settings, by the name of the golden data."""
    members = {}
    for case in SETTINGS["streamingllm"]:
        sink, recent = case["sink"], case["budget"] - case["sink"]
        members[f"streamingllm{sink}"] = f"streamingllm(sink_keep_tokens={sink},recent_keep_tokens={recent})"
    for case in SETTINGS["snapkv"]:
        window = case["window"]
        members[f"snapkv{window}"] = SNAPKV.format(keep=case["budget"] - window, window=window)
    # The press's budgets follow neither formula of the member. Half a row more, since budgets are rounded down.
    window = SETTINGS["pyramidkv"]["window"]
    scored = GOLDEN[f"{QUICK}/pyramidkv/budgets"] - window
    ratios = np.minimum((scored + 0.5) / scored[0], 1.0)
    members["pyramidkv"] = PYRAMIDKV.format(
        keep=scored[0], window=window, ratios=";".join(str(ratio) for ratio in ratios)
    )
    budget, recent = SETTINGS["h2o"]["budget"], SETTINGS["h2o"]["recent"]
    return members | {"h2o": H2O.format(budget=budget, ratio=recent / budget)}


MEMBERS = compositions()


@pytest.fixture(scope="module")
def smollm2(default_model: pathlib.Path) -> LoadedModel:
    return load_model(str(default_model), progress=False)


def bits_of(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Golden bits over rows, for all layers and heads if they hold for all."""
    return np.broadcast_to(np.unpackbits(GOLDEN[key], axis=-1)[..., : shape[-1]].astype(bool), shape)


def unexplained(found: np.ndarray, name: str) -> np.ndarray:
    """Rows that are kept on one side only, though their score is clearly above or below the last kept one's."""
    wanted = bits_of(f"{name}/kept", found.shape)
    np.testing.assert_array_equal(found.sum(-1), wanted.sum(-1))
    near = bits_of(f"{name}/near", found.shape) if f"{name}/near" in GOLDEN else np.zeros_like(wanted)
    return (found != wanted) & ~near


def session_of(kind: type[Session], model: LoadedModel, composition: str) -> Session:
    shape = {"page_size": 16, "max_len": 768, "num_rows": 1, "chunk": CHUNK}
    return kind(composition, spec=model.spec, weights=model.weights, **shape)


def kept_rows(session: Session, prompt: str) -> np.ndarray:
    """Rows that the prompt's compaction leaves in each layer and head, bool [layers, kv_heads, prompt tokens]."""
    ids = GOLDEN[f"{prompt}/ids"]
    session.prefill({1: ids.tolist()})
    kept = np.zeros((session.spec.num_layers, session.spec.num_kv_heads, len(ids)), bool)
    for layer, head in np.ndindex(kept.shape[:2]):
        kept[layer, head, session.positions(1, layer, head)] = True
    return kept


# One setting of each member is quick enough for every run.
CASES = [
    pytest.param(name, prompt, marks=[] if prompt == QUICK and name not in ("streamingllm16", "snapkv64") else SLOW)
    for name in MEMBERS
    for prompt in SETTINGS["prompts"]
]


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_members_keep_the_same_rows(smollm2: LoadedModel, name: str, prompt: str) -> None:
    kept = kept_rows(session_of(Session, smollm2, MEMBERS[name]), prompt)
    assert not unexplained(kept, f"{prompt}/{name}").any()


def test_another_kernel_width_is_noticed(smollm2: LoadedModel) -> None:
    """The comparison is worth something only if a slightly different method differs in many rows."""
    other = MEMBERS["snapkv32"].replace("pool_kernel_size=5", "pool_kernel_size=3")
    kept = kept_rows(session_of(Session, smollm2, other), QUICK)
    assert unexplained(kept, f"{QUICK}/snapkv32").sum() > 0.01 * kept.sum()


@functools.partial(jax.jit, static_argnums=0)
def heads_of(spec: ModelSpec, weights: Weights, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries [layers, tokens, q_heads, head_dim] and keys [layers, tokens, kv_heads, head_dim], rotated."""
    architecture = get_architecture(spec.architecture)
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    causal = (positions[:, None] >= positions[None, :])[None]
    x, queries, keys = architecture.embed(spec, weights, tokens), [], []
    for index in range(spec.num_layers):

        def attend(heads):
            q, k, v = finish(heads)
            queries.append(q)
            keys.append(k)
            return dense_attention(q, k, v, causal, spec.head_dim**-0.5)

        x = architecture.layer(spec, weights["layers"][index], x, positions, attend)
    return jnp.stack(queries), jnp.stack(keys)


def attention_sums(model: LoadedModel, ids: np.ndarray) -> np.ndarray:
    """Attention that each row gets from all queries, summed over its group: float32 [layers, kv_heads, rows]."""
    spec, length = model.spec, len(ids)
    geometry = spec.geometry(16, MAX_LEN)
    tokens = np.zeros(MAX_LEN, np.int32)
    tokens[:length] = ids
    queries, keys = heads_of(spec, model.weights, jnp.asarray(tokens))
    index = jnp.arange(MAX_LEN, dtype=jnp.int32)
    limit = jnp.where(index < length, index + 1, 0)[None, None]
    out = []
    for q, k in zip(queries, keys, strict=True):
        rows = paged(geometry, k[None], k[None], length)
        out.append(mass(geometry, q[None], rows.pools, rows.view, limit)[0, :, :length])
    return np.asarray(jnp.stack(out))


@functools.partial(jax.jit, static_argnums=0)
def mass(geometry: Geometry, q: jax.Array, pools: dict, view: PageView, limit: jax.Array) -> jax.Array:
    storage = plain_storage()
    load_tile = functools.partial(storage.load_tile, storage.params, geometry)
    names = tuple(name for name in pools if name != POSITIONS)
    how = {"load_tile": load_tile, "layer": jnp.int32(0), "scale": geometry.scale}
    lse = api.attention_lse(q, pools, names, view, limit, **how)
    return api.row_scores(q, pools, names, view, limit, lse=lse, group="sum", **how)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Which rows of [..., rows] have the `count` best scores, ties to the lower row."""
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, np.argsort(-scores, -1, kind="stable")[..., :count], True, -1)
    return mask


@SLOW
@pytest.mark.parametrize("prompt", SETTINGS["prompts"])
def test_observed_attention(smollm2: LoadedModel, prompt: str) -> None:
    """The kernels' attention mass is the press's, which divides it by how many queries see a row and by the group."""
    spec, ids = smollm2.spec, GOLDEN[f"{prompt}/ids"]
    sums = attention_sums(smollm2, ids)
    means = sums / np.arange(len(ids), 0, -1, dtype=np.float32) * (spec.num_kv_heads / spec.num_q_heads)
    sample = means[..., :: SETTINGS["score_stride"]]
    np.testing.assert_allclose(sample, GOLDEN[f"{prompt}/observed/scores"], rtol=1e-4)
    kept = best(means, SETTINGS["observed"]["budget"])
    assert not unexplained(kept, f"{prompt}/observed").any()


class Replayed(Session):
    """Replays what the press did, and notes the scores of all rows before the prompt is compacted."""

    scores: np.ndarray  # [layers, kv_heads, rows]

    def _replay(self, row: int, prompt: list[int]) -> None:
        (name,) = (name for name in SETTINGS["prompts"] if GOLDEN[f"{name}/ids"].tolist() == prompt)
        lengths, ids = GOLDEN[f"{name}/kvzip/replay_lengths"], GOLDEN[f"{name}/kvzip/replays"]
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        self.method = dataclasses.replace(
            self.method,
            replays=lambda params, tokens: tuple(lengths.tolist()),
            replay_tokens=lambda params, prompt, index: parts[index],
        )
        super()._replay(row, prompt)

    def _maintain(self, row: int, phase: str) -> None:
        if phase == "prompt":
            stored, spec = np.asarray(self.state.page_aux[kvzip.SCORES]), self.spec
            layers = range(spec.num_layers)
            pages = [[self.head_pages(row, layer, head) for head in range(spec.num_kv_heads)] for layer in layers]
            scores = stored[np.asarray(pages)].reshape(spec.num_layers, spec.num_kv_heads, -1)
            self.scores = scores[..., : self.rows[row].length]
        super()._maintain(row, phase)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_kvzip(smollm2: LoadedModel, prompt: str) -> None:
    """The published score by the press's replays, its choice among a layer's heads, and an equal one in each head."""
    session = session_of(Replayed, smollm2, KVZIP)
    kept = kept_rows(session, prompt)
    sample = session.scores[..., :: SETTINGS["score_stride"]]
    np.testing.assert_allclose(sample, GOLDEN[f"{prompt}/kvzip/scores"], rtol=2e-4)
    assert not unexplained(kept, f"{prompt}/kvzip").any()
    scores = session.scores.copy()
    scores[..., : SETTINGS["kvzip"]["sink"]] = np.inf
    scores = scores.reshape(len(scores), -1)
    count = bits_of(f"{prompt}/kvzip_by_layer/kept", scores.shape)[0].sum()
    assert not unexplained(best(scores, count), f"{prompt}/kvzip_by_layer").any()
