"""What `benchmarks.quality` measures, on inputs made by hand, and that a wrong method comes out as one."""

from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from benchmarks import common, lines
from benchmarks.quality import __main__ as command
from benchmarks.quality import local, report, scores, sweep, tasks, variants
from benchmarks.rows import Rows
from sparsejax import registry
from sparsejax.geometry import Geometry
from sparsejax.models.load import load_model
from sparsejax.runner import DeviceRunner

SMALL = "sink_keep_tokens=8,decode_keep_tokens=40,recent_keep_tokens=16"
SNAPKV = f"snapkv({SMALL},observation_window_size=8)"


# Scores


def test_wilson_is_the_textbooks():
    # Newcombe 1998, method 3: 81 of 263 and 0 of 20.
    assert scores.wilson(81, 263) == pytest.approx((81 / 263, 0.2553, 0.3662), abs=1e-4)
    assert scores.wilson(0, 20) == pytest.approx((0.0, 0.0, 0.1611), abs=1e-4)
    low, high = scores.wilson(20, 20)[1:]
    assert (low, high) == (pytest.approx(1 - 0.1611, abs=1e-4), 1.0)


@pytest.mark.parametrize(("hits", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses(hits, trials):
    with pytest.raises(ValueError, match="no share"):
        scores.wilson(hits, trials)


def test_bootstrap_draws_clusters():
    values = np.random.default_rng(1).standard_normal(200)
    found = scores.bootstrap([[value] for value in values])
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert found == pytest.approx((values.mean(), values.mean() - half, values.mean() + half), abs=0.03)
    # Copies within a cluster tell nothing new, though they are four times as many values.
    copied = scores.bootstrap([[value] * 4 for value in values])
    assert copied == pytest.approx(found)
    assert scores.bootstrap([[1.0, 3.0], [5.0]]).value == 3.0
    assert scores.bootstrap([[1.0, 3.0]]) == (2.0, -math.inf, math.inf)
    with pytest.raises(ValueError, match="no values"):
        scores.bootstrap([[], []])


def test_agreement_by_luck_gives_no_certainty():
    assert scores.bootstrap([[1.0]] * 4)[1:] == (1.0, 1.0)
    assert scores.cautious([[1.0]] * 4, 8) == scores.wilson(8, 8)
    wide = scores.cautious([[0.0], [1.0], [0.0], [1.0]], 1000)
    assert wide[1:] == scores.bootstrap([[0.0], [1.0], [0.0], [1.0]])[1:]


def test_comparison_of_distributions():
    p, q = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.5, 0.25]])
    both = np.concatenate([p, p]).astype(np.float32), np.concatenate([q, p + 7.0]).astype(np.float32)
    found = scores.compare(*both, [1, 0])
    assert found.nll == pytest.approx([math.log(2), math.log(2)], rel=1e-5)
    assert found.kl == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-6)
    assert found.same.tolist() == [False, True]


def test_answers_are_ranked_among_candidates():
    logits = np.full(10, -1.0, np.float32)
    logits[[3, 4, 5, 6]] = 2.0, 1.0, 4.0, 0.0
    assert scores.judge(logits, [3], [3, 4, 6])[:3] == (1, 1, False)  # 5 is likelier, but no candidate
    assert scores.judge(logits, [4], [3, 4, 6])[:3] == (0, 1, False)
    assert scores.judge(logits, [5], [3, 5])[:3] == (1, 1, True)
    assert scores.judge(logits, [3, 6], [3, 4, 6])[:2] == (1, 2)  # of the two best, 3 and 4, one is right
    assert scores.judge(logits, [3, 4], [3, 4, 6])[:2] == (2, 2)
    weights = np.exp(logits.astype(float))
    assert scores.judge(logits, [4, 6], [4, 6]).logprob == pytest.approx(math.log(weights[4] / weights.sum()))


def test_a_model_that_says_nothing_scores_nothing():
    assert scores.judge(np.zeros(8, np.float32), [2], [1, 2, 3])[:3] == (0, 1, False)


def test_broken_logits_are_refused():
    with pytest.raises(ValueError, match="finite"):
        scores.judge(np.asarray([0.0, np.nan], np.float32), [0], [0, 1])
    with pytest.raises(ValueError, match="candidate"):
        scores.judge(np.zeros(3, np.float32), [0], [1, 2])


def test_tasks_that_dense_fails_are_dropped():
    assert scores.drop_reason(8, 8, 0.1) is None
    assert "dense scores 0.12" in (scores.drop_reason(1, 8, 0.1) or "")
    assert scores.drop_reason(3, 8, 0.1) is None


# Tasks


def encode(text: str) -> list[int]:
    """One id per byte."""
    return list(text.encode())


def contexts(count: int, length: int = 1400, continuation: int = 6) -> list[tasks.Context]:
    vocabulary = tasks.Vocabulary.of(encode, common.prose())
    pieces = tasks.paragraphs(common.prose())
    return [tasks.make_context(encode, pieces, vocabulary, length, continuation, seed) for seed in range(count)]


def text(ids) -> str:
    return bytes(ids).decode(errors="replace")


def test_contexts_follow_from_their_seed():
    first, second = contexts(2)
    assert contexts(1) == [first]
    assert first.ids != second.ids
    assert len(first.ids) == len(second.ids) == 1400
    assert {question.task for question in first.questions} == set(tasks.TASKS)


def test_questions_can_be_answered_from_the_context_only():
    for context in contexts(4, 4000):
        shown = text(context.ids)
        for question in context.questions:
            assert set(question.answers) <= set(question.candidates)
            assert question.chance == len(question.answers) / 11
            lead = text(question.ids).rpartition("\n\nAssistant: ")[2]
            if question.task == "variable":
                # Who gave it owns it.
                giver, taker = lead.split(" gave ")
                assert f"{giver} gave {taker.split()[0]} what he owns" in shown
                lead = f"{giver} owns the "
            # The words behind the answer's beginning are what the context says behind the same words.
            told = {part[0] for part in shown.lower().split(lead.lower())[1:]}
            assert {chr(i) for i in question.answers} == told, question.task
            assert lead not in common.prose()


def test_the_continuation_goes_on_where_the_context_ends():
    for context in contexts(5, 3000, 30):
        joined = text(context.ids[-40:] + context.continuation[:30])
        assert any(joined in "\n\n".join(part) for part in [tasks.paragraphs(common.prose()) * 2]), joined


def test_depths_are_where_the_facts_are():
    context = contexts(1, 4000)[0]
    depths = {question.task: question.depth for question in context.questions}
    assert depths["early_turn"] == 0.0
    place = text(context.ids).index("The secret word of the old captain is")
    assert depths["single"] == pytest.approx(place / 4000, abs=0.01)  # bytes of some letters are two
    assert 0.3 < depths["tool_result"] < 0.8


def test_two_contexts_have_needles_at_ten_depths():
    found = [q.depth for context in contexts(2, 40000) for q in context.questions if q.task in tasks.NEEDLES]
    assert len(found) == 12
    assert {int(depth * 10) for depth in found} == set(range(10))


def test_answers_do_not_occur_in_the_prose():
    vocabulary = tasks.Vocabulary.of(encode, common.prose())
    assert not [word for word in vocabulary.words if word in common.prose().lower()]
    assert len(set(vocabulary.first)) == len(vocabulary.first)
    assert vocabulary.glue == (ord(" "),)
    with pytest.raises(ValueError, match="tells 2 of"):
        tasks.Vocabulary.of(encode, "", ("maple", "monkey", "lemon"))


def test_contexts_too_short_for_their_facts_are_refused():
    with pytest.raises(ValueError, match="need more than"):
        contexts(1, 500)


# Sweep


@pytest.fixture(scope="module")
def tiny():
    model = load_model("tiny-llama", load_format="dummy", dtype="float32")
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, max_model_len=2048))


def pools_of(model, chosen, length=1400):
    return variants.pools(chosen, lambda size: model.spec.geometry(size, 2048), length)


H2O = "h2o(h2o_decode_budget=40,h2o_decode_eviction=true,h2o_decode_eviction_interval=4)"


@pytest.mark.parametrize("spec", [SNAPKV, f"quest({SMALL},quest_skip_layers=0)", f"{SNAPKV}+quest+fp8_kv", H2O])
def test_a_fork_of_the_shared_prefill_is_the_methods_own(tiny, spec):
    """Same logits, bit for bit, as when the method reads the prompt itself, with a question appended in between."""
    method, storage = registry.resolve(spec)
    others = [variants.parse(other).method for other in (SNAPKV.replace("40", "80"), "quest(decode_keep_tokens=99)")]
    base = variants.recorder([*others, method])
    geometry = tiny.spec.geometry(16, 512)
    ids = encode(common.prose()[:300])

    def runner(**methods):
        return DeviceRunner(
            tiny.spec,
            tiny.weights,
            geometry,
            methods,
            storage,
            num_rows=3,
            num_sequence_pages=100,
            decode_buckets=(1,),
            prefill_buckets=((1, 64),),
        )

    alone = Rows(runner(own=method), "own")
    alone.prefill(1, ids[:256])
    shared = runner(own=method, base=base)
    trunk = Rows(shared, "base")
    trunk.prefill(1, ids[:192])
    trunk.fork(trunk, 1, 3)
    trunk.append(3, ids[:64])  # another question, which must not be heard
    trunk.release(3)
    trunk.fork(trunk, 1, 2)
    trunk.append(2, ids[192:256])
    branch = Rows(shared, "own", trunk.pool)
    branch.fork(trunk, 2, 3)
    branch.finish_prompt(3)
    assert branch.length(3) == alone.length(1)
    for token in ids[256:264]:
        expected = np.asarray(alone.logits([1], [token]))
        np.testing.assert_array_equal(np.asarray(branch.logits([3], [token])), expected)
    for rows in (branch, trunk):
        for row in list(rows.pages):
            rows.release(row)
    assert trunk.used_head_pages == Rows(shared, "base").used_head_pages, "pages were lost"


def test_variants_share_a_prefill_where_they_can(tiny):
    specs = ["dense", SNAPKV, SNAPKV.replace("40", "50"), "quest", "fp8_kv", "quest(quest_chunk_size=32)"]
    specs += [SNAPKV.replace("window_size=8", "window_size=4")]
    groups = pools_of(tiny, [variants.parse(spec) for spec in specs])
    assert [[variant.spec for variant in pool.variants] for pool in groups] == [
        specs[:4],
        [specs[4]],
        [specs[5]],
        [specs[6]],
    ]
    between = dataclasses.replace(
        variants.random_eviction(32), keep_count=lambda params, phase, lengths: np.minimum(lengths, 32)
    )
    odd = dataclasses.replace(variants.parse("dense"), method=between)
    alone = pools_of(tiny, [variants.parse("dense"), odd])[1]
    assert alone.base is between
    assert "between the chunks" in (alone.why_alone or "")


def test_labels_tell_family_and_budget():
    found = variants.parse(f"{SNAPKV}+quest(decode_keep_tokens=9,sink_keep_tokens=1,recent_keep_tokens=0)+fp8_kv")
    assert (found.label, found.family, found.budget) == ("snapkv+quest+fp8_kv 64", "snapkv+quest+fp8_kv", 64)
    assert variants.parse("dense").label == "dense"
    assert (variants.parse("fp8_kv").label, variants.parse("fp8_kv").budget) == ("fp8_kv", None)


LATE = f"rkv({SMALL},rkv_compression_interval=10,rkv_observation_tokens=4)"
REPLAYED = "kvzip(kvzip_token_budget=64,kvzip_score_chunk_size=100,kvzip_prev_postfix_size=10)"
GEOMETRY = {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 16, "scale": 1.0}


@pytest.mark.parametrize(
    ("spec", "when"),
    [
        ("dense", "prompt"),
        ("quest", "prompt"),
        (SNAPKV, "prompt"),
        ("snapkv(decode_keep_tokens=99999)", "prompt"),
        ("streamingllm", "prompt"),
        ("pyramidkv", "prompt"),
        (LATE, "decode"),
        (LATE.replace("(", "(rkv_compress_prompt=true,", 1), "prompt"),
        ("skipkv+quest+fp8_kv", "decode"),
        (REPLAYED, "replay"),
    ],
)
def test_when_methods_act_follows_from_what_they_declare(spec, when):
    geometry = Geometry(**GEOMETRY, max_model_len=4096)
    assert variants.acts(registry.resolve(spec)[0], geometry) == when


def test_first_eviction_of_methods_that_act_while_decoding():
    geometry = Geometry(**GEOMETRY, max_model_len=4096)
    late = registry.resolve(LATE)[0]
    assert variants.first_eviction(late, 1000, geometry) == 10
    assert variants.first_eviction(late, 40, geometry) == 40  # 74 rows are reached after 34 tokens, and 40 ends a tenth
    assert variants.first_eviction(late, 1000, geometry, most=9) == 0
    assert variants.first_eviction(registry.resolve(SNAPKV)[0], 1000, geometry) == 0


def test_families_are_what_the_registry_finds():
    entries = registry.available()
    found = variants.families()
    assert set(found) == set(entries) - {"dense", "plain"}
    axes = [entries[name].axis for name in found]
    assert axes == sorted(axes, key=("retention", "selection", "prefill", "storage").index)
    usual = variants.usual([64, 128], found)
    labels = [variant.label for variant in usual]
    assert len(set(labels)) == len(labels) or any(len(entries[name].samples) > 1 for name in found)
    for name in found:
        budgets = [variant.budget for variant in usual if variant.family == name]
        assert budgets == [64, 128] if entries[name].sized else len(budgets) == len(entries[name].samples)
    both = variants.usual([64], ["snapkv+quest+fp8_kv"])[0]
    assert (both.family, both.budget, both.spec) == (
        "snapkv+quest+fp8_kv", 64, registry.sized("snapkv+quest+fp8_kv", 64)
    )  # fmt: skip


def test_few_contexts_of_each_length():
    several = [*contexts(3, 1400), *contexts(2, 1500)]
    assert sweep.first_ones(several, None) == set(range(5))
    assert sweep.first_ones(several, 1) == {0, 3}
    assert sweep.first_ones(several, 2) == {0, 1, 3, 4}


SENTENCES = f"skipkv({SMALL},skipkv_compression_interval=12,skipkv_observation_tokens=4,skipkv_delimiter_ids=32)"
PYRAMID = f"pyramidkv({SMALL},observation_window_size=8)"


@pytest.mark.parametrize("spec", [SNAPKV, H2O, PYRAMID, REPLAYED, LATE, SENTENCES])
def test_a_context_is_evicted_as_by_the_method_itself(tiny, spec):
    """Same rows and the same logits, bit for bit, when nothing was appended in between; all methods in one pool."""
    context = contexts(1, 1200, 4)[0]
    variant = variants.parse(spec)
    chosen = [variants.parse(other) for other in ("dense", SNAPKV.replace("40", "80"), REPLAYED.replace("64", "99"))]
    [pool] = pools_of(tiny, [*chosen, variant], 1200)
    tail = sweep.tail_of(pool, 1200, tiny.spec.geometry(16, 2048))
    replay = sweep.replay_tokens(pool, 1200)
    bench = sweep.Bench(tiny, pool, 1400, 9, 64, 200, replay)
    sweep._prefill(bench, 1, context, tail.tokens)
    if tail.tokens:
        sweep._decode_trunks(bench, [context], tail)
    bench.base.replay(1, context.ids)
    bench.remember(bench.base, 1)
    rows = bench.rows(variant)
    outcome = sweep.Outcome(variant, acts=variants.acts(variant.method, bench.geometry))
    sweep._evict(bench, outcome, rows, [context], tail)
    shared = bench.kept[0]

    alone = Rows(bench.runner, variant.label, bench.base.pool, sweep.PREFILL_CHUNK)
    own = bench.timed[0]
    alone.prefill(own, context.ids[: 1200 - tail.tokens])
    for token in context.ids[1200 - tail.tokens :]:
        alone.logits([own], [token])
    assert alone.length(own) < 1200 / 4
    for one, other in zip(rows.positions(shared), alone.positions(own), strict=True):
        for head, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(head, expected)
    expected = np.asarray(alone.logits([own], [5]))
    np.testing.assert_array_equal(np.asarray(rows.logits([shared], [5])), expected)


def test_late_methods_are_asked_everything_afterwards(tiny):
    asked = contexts(2)
    groups = pools_of(tiny, [variants.parse(spec) for spec in ("dense", LATE, REPLAYED)])
    seen: list[str] = []
    outcomes = sweep.run(tiny, groups, asked, seen.append, few=1, windows=1)
    assert len(seen) == sweep.num_steps(groups, asked, 1)
    facts = report.summarise(outcomes, asked)["1400"]["variants"]
    for outcome in outcomes[1:]:
        found = facts[outcome.variant.label]
        assert outcome.invalid is None
        assert (found["contexts"], list(outcome.by_context)) == (1, [0])
        assert len(outcome.by_context[0].answers) == len(asked[0].questions)
        assert "question_in_prompt" not in found
        assert found["resident_share"] < 0.15
        assert found["decode_speed"]["ratio"] > 0
        assert found["decode_speed"]["rows"] == 1
    assert facts["dense"]["contexts"] == 2
    page = report.markdown({"lengths": report.summarise(outcomes, asked)}, MANIFEST, [])
    assert "| rkv 64 [d] | 1 |" in page
    assert "- [r]: the context is read once more" in page


def test_nothing_begins_when_the_time_is_up(tiny):
    asked = contexts(1)
    groups = pools_of(tiny, [variants.parse(spec) for spec in ("dense", SNAPKV, "fp8_kv")])
    seen: list[str] = []
    outcomes = sweep.run(tiny, groups, asked, seen.append, most_s=0.0)
    assert [outcome.invalid for outcome in outcomes] == [None, sweep.NO_TIME, sweep.NO_TIME]
    assert len(seen) == sweep.num_steps(groups, asked)
    facts = report.summarise(outcomes, asked)["1400"]["variants"]
    assert facts["dense"]["kl_nats"].value == pytest.approx(0.0, abs=1e-6)
    assert facts["fp8_kv"]["invalid"] == sweep.NO_TIME


@pytest.fixture(scope="module")
def swept(tiny):
    """Dense, the same under another name, a method, one that breaks, and the controls."""
    dense = variants.parse("dense")
    same = dataclasses.replace(dense, label="dense again", family="dense again")
    kept = dataclasses.replace(variants.parse(SNAPKV.replace("40", "1376")), label="keeps all")
    groups = pools_of(tiny, [dense, same, kept, variants.parse(SNAPKV), *variants.controls([64])])
    seen: list[str] = []
    asked = contexts(2)
    outcomes = sweep.run(tiny, groups, asked, seen.append)
    assert len(seen) == sweep.num_steps(groups, asked)
    return outcomes, asked


def test_dense_is_no_distance_from_itself(swept):
    outcomes, asked = swept
    facts = report.summarise(outcomes, asked)["1400"]["variants"]
    for name in ("dense", "dense again", "keeps all"):
        assert facts[name]["kl_nats"].value == pytest.approx(0.0, abs=1e-6), name
        assert facts[name]["top1_agreement"].value == 1.0
        assert facts[name]["loss"].value == pytest.approx(0.0, abs=1e-6)
    assert facts["dense again"]["raw"]["answers"] == facts["dense"]["raw"]["answers"]
    assert facts["snapkv 64"]["kl_nats"].low > 1e-4
    assert facts["snapkv 64"]["resident_share"] < 0.1


def test_wrong_methods_are_far_from_dense(swept):
    outcomes, asked = swept
    facts = report.summarise(outcomes, asked)["1400"]["variants"]
    for name in ("random eviction 64", "shuffled positions"):
        assert facts[name]["kl_nats"].low > 1e-4, name
        assert facts[name]["top1_agreement"].value < 1.0, name


def test_perplexity_is_that_of_the_forced_text(swept, tiny):
    """Against one dense row that reads everything token by token."""
    outcomes, asked = swept
    found = outcomes[0].by_context[0]
    ids = [*asked[0].ids, *asked[0].continuation]
    runner = DeviceRunner(
        tiny.spec,
        tiny.weights,
        tiny.spec.geometry(16, 2048),
        {"dense": registry.resolve("dense")[0]},
        registry.resolve("dense")[1],
        num_rows=1,
        num_sequence_pages=100,
        decode_buckets=(1,),
        prefill_buckets=((1, 512),),
    )
    rows = Rows(runner, "dense")
    rows.prefill(1, ids[:1300])
    nll = []
    for place in range(1300, len(ids) - 1):
        logits = np.asarray(rows.logits([1], [ids[place]]))[0].astype(np.float64)
        nll.append(float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[ids[place + 1]]))
    assert found.nll == pytest.approx(nll[-len(found.nll) :], abs=1e-4)
    assert len(found.nll) == len(asked[0].continuation) - 1


def test_questions_asked_later_are_asked_of_methods_that_evict(swept):
    outcomes, asked = swept
    by_label = {outcome.variant.label: outcome for outcome in outcomes}
    later = [i for i, question in enumerate(asked[0].questions) if question.task in sweep.LATER]
    assert sorted(by_label["snapkv 64"].by_context[0].later) == later
    assert not by_label["dense"].by_context[0].later


def test_a_method_that_breaks_is_invalid_and_the_rest_goes_on(tiny):
    asked = contexts(1, 1200, 4)
    dense = variants.parse("dense")
    odd = dataclasses.replace(dense, label="broken")
    groups = pools_of(tiny, [dense, odd, dataclasses.replace(dense, label="after")])
    real = Rows.logits

    def logits(self, rows, tokens):
        if self.name == "broken":
            raise sweep.NotFiniteError("broken: logits are not finite")
        return real(self, rows, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "logits", logits)
        outcomes = sweep.run(tiny, groups, asked)
    facts = report.summarise(outcomes, asked)["1200"]
    assert facts["variants"]["broken"]["invalid"] == "broken: logits are not finite"
    assert not {"kl_nats", "tasks", "raw"} & set(facts["variants"]["broken"])
    assert facts["variants"]["after"]["kl_nats"].value == pytest.approx(0.0, abs=1e-6)
    page = report.markdown({"lengths": {"1200": facts}}, MANIFEST, [])
    assert "invalid: broken: logits are not finite" in page


def test_logits_that_are_not_finite_are_noticed(tiny):
    method, storage = registry.resolve("dense")
    runner = DeviceRunner(
        tiny.spec,
        tiny.weights,
        tiny.spec.geometry(16, 64),
        {"dense": method},
        storage,
        num_rows=1,
        num_sequence_pages=8,
        decode_buckets=(1,),
        prefill_buckets=((1, 16),),
    )
    rows = Rows(runner, "dense")
    rows.prefill(1, [1, 2, 3])
    pools = {**runner.state.pools, "v": runner.state.pools["v"].at[:].set(np.nan)}
    runner.state = runner.state.replace(pools=pools)
    with pytest.raises(sweep.NotFiniteError, match="not finite"):
        rows.logits([1], [4])


def test_forgotten_programs_come_back(tiny):
    [pool] = pools_of(tiny, [variants.parse(spec) for spec in ("dense", SNAPKV)], 40)
    bench = sweep.Bench(tiny, pool, 64, 1, 8, 8)
    bench.base.prefill(1, range(1, 21))
    rows = bench.rows(pool.variants[1])
    rows.fork(bench.base, 1, 2)
    rows.logits([2], [3])
    held = set(bench.runner._programs)
    bench.runner.forget("snapkv 64")
    assert {key for key in held if "snapkv 64" in key} == held - set(bench.runner._programs) != set()
    assert np.isfinite(np.asarray(rows.logits([2], [4]))).all()


# Report

MANIFEST = dict.fromkeys(("model", "dtype", "device", "cpu", "date", "git_commit", "command"), "x")


def interval(value: float) -> scores.Interval:
    return scores.Interval(value, value - 0.05, value + 0.05)


def facts_of(kl: float, retrieval: float, budget: int | None = 64, control: bool = False) -> dict:
    return {
        "control": control,
        "budget_tokens": budget,
        "kl_nats": interval(kl),
        "retrieval": interval(retrieval),
    }


def test_controls_must_lose_to_every_method_of_their_budget():
    found = {"dense": facts_of(0.0, 1.0, None), "good": facts_of(0.3, 0.8), "other": facts_of(5.0, 0.0, 32)}
    found["random"] = facts_of(0.5, 0.1, control=True)
    assert report.verdicts(found) == {
        "random": {"compared_with": 1, "closest": "good", "kl_clearly_worst": True, "retrieval_worst": True}
    }
    found["random"] = facts_of(0.39, 0.9, control=True)  # apart, but not clearly
    verdict = report.verdicts(found)["random"]
    assert (verdict["kl_clearly_worst"], verdict["retrieval_worst"]) == (False, False)
    assert "NOT clearly worse than good" in report.control_lines({"controls": {"random": verdict}})[0]
    found["random"] = facts_of(4.0, 0.0, None, control=True)  # without a budget it must lose to all
    assert report.verdicts(found)["random"]["closest"] == "other"


def test_dropped_tasks_count_nowhere(swept):
    outcomes, asked = swept
    found = report.summarise(outcomes, asked)["1400"]
    kept = [task for task, facts in found["tasks"].items() if facts["dropped"] is None]
    answers = found["variants"]["dense"]["tasks"]
    if kept:
        mean = math.fsum(answers[task]["score"].value for task in kept) / len(kept)
        assert found["variants"]["dense"]["retrieval"].value == pytest.approx(mean)
    else:
        assert "retrieval" not in found["variants"]["dense"]
    page = report.markdown({"lengths": {"1400": found}}, MANIFEST, [])
    assert page.count(" is dropped: dense scores") == len(tasks.TASKS) - len(kept)


def test_answers_are_told_apart_by_depth():
    right, wrong = scores.Answer(1, 1, True, -0.1), scores.Answer(0, 1, False, -3.0)
    questions = [
        tasks.Question(task, depth, (1,), (1,), (1, 2))
        for task, depth in (("single", 0.1), ("early_turn", 0.0), ("variable", 0.99), ("multi_key", 0.5))
    ]
    context = tasks.Context((), (), tuple(questions))
    found = sweep.Found(0, [], [], [], [right, wrong, right, wrong], {}, 0.0, 0.0)
    depths = report._by_depth([found], [context], ("single", "early_turn", "variable", "multi_key"))
    assert depths == [[0, 0], [1, 1], *[[0, 0]] * 3, [0, 1], *[[0, 0]] * 4]  # needles only
    assert sum(trials for _, trials in report._by_depth([found], [context], ("single",))) == 1


# Pictures


def test_lines_are_valid_and_escape_text():
    series = {"a<b": [lines.Point(0.1, 0.5, 0.4, 0.6), lines.Point(1.0, 0.9)], "c": [lines.Point(0.5, 0.1)]}
    shown = lines.svg("x & y", series, "share", "score", log_x=True, levels={"chance": 0.1}, percent_x=True)
    root = ET.fromstring(shown)
    texts = [node.text for node in root.iter() if node.text and node.tag.endswith("text")]
    assert {"x & y", "a<b", "c", "chance", "share", "score", "10%", "100%"} <= set(texts)
    assert len([node for node in root.iter() if node.tag.endswith("polyline")]) == 2


def test_lines_put_values_where_they_belong():
    axis = lines.Axis([0.01, 1.0], 0.0, 100.0, log=True)
    assert [axis(x) for x in (0.01 / 1.1, 0.1, 1.1)] == pytest.approx([0.0, 50.0, 100.0])
    assert axis.ticks == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    assert lines.Axis([1e-4, 1.0], 0, 1, log=True).ticks == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.0])
    assert len(lines.Axis([0.3], 0, 1, log=True).ticks) >= 1
    axis = lines.Axis([2.0, 10.0], 100.0, 0.0, zero=True)
    assert [axis(y) for y in (0.0, 5.0, 10.0)] == pytest.approx([100.0, 50.0, 0.0])
    assert axis(math.inf) == 0.0
    with pytest.raises(ValueError, match="above 0"):
        lines.Axis([0.0, 1.0], 0, 1, log=True)
    with pytest.raises(ValueError, match="needs a value"):
        lines.Axis([math.inf], 0, 1)
    with pytest.raises(ValueError, match="can't be told apart"):
        lines.svg("", {str(i): [lines.Point(1, 1)] for i in range(17)}, "", "")


def test_sixteen_lines_can_be_told_apart():
    shown = lines.svg("", {str(i): [lines.Point(1, 1), lines.Point(2, 2)] for i in range(16)}, "", "")
    nodes = [node for node in ET.fromstring(shown).iter() if node.tag.endswith("polyline")]
    looks = [(node.get("stroke"), node.get("stroke-dasharray")) for node in nodes]
    assert len(set(looks)) == 16
    hollow = [node for node in ET.fromstring(shown).iter() if node.get("fill") == "#ffffff"]
    assert len(hollow) == 8 * 3  # two points and the legend


# Tasks from a folder


def folder(tmp_path, *items: dict):
    (tmp_path / "toy.jsonl").write_text("\n".join(json.dumps(item) for item in items))
    return tmp_path


def test_items_are_read(tmp_path):
    path = folder(
        tmp_path,
        {"context": "2 + 2 = ", "choices": ["4", "five"], "gold": 0},
        {"context": "Ab", "choices": ["c", "d"], "gold": 1},
    )
    found = local.read_folder(path, encode, None)
    assert list(found) == ["toy"]
    first, second = found["toy"]
    assert text(first.context) == "2 + 2 ="
    assert [text(choice) for choice in first.choices] == [" 4", " five"]
    assert (first.characters, second.gold) == ((1, 4), 1)
    assert len(local.read_folder(path, encode, 1)["toy"]) == 1


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"context": "ab"}, "choices"),
        ({"context": "ab", "choices": ["x"], "gold": 0}, "at least two"),
        ({"context": "ab", "choices": ["x", "y"], "gold": 2}, "0 to 1"),
        ({"context": "ab", "choices": ["x", "y"], "gold": True}, "0 to 1"),
        ({"context": "", "choices": ["x", "y"], "gold": 0}, "two tokens"),
    ],
)
def test_bad_items_are_refused_with_their_place(tmp_path, item, message):
    with pytest.raises(ValueError, match=rf"toy.jsonl line 1.*{message}"):
        local.read_folder(folder(tmp_path, item), encode, None)
    with pytest.raises(ValueError, match=r"no \.jsonl"):
        local.read_folder(tmp_path / "nowhere", encode, None)


def test_choices_are_ranked_in_all_and_per_character():
    assert local.judge([-2.0, -3.0], [1, 3], 0) == (True, False)
    assert local.judge([-2.0, -3.0], [1, 3], 1) == (False, True)
    assert local.judge([-2.0, -2.0], [1, 1], 0) == (False, False)


def test_choices_are_scored_by_their_tokens(tiny):
    """Against the log-likelihood of each choice read as one text; a budget above the text changes nothing."""
    item = local.Item(tuple(encode("The cat sat on")), (tuple(encode(" the mat")), tuple(encode(" a"))), (8, 2), 0)
    dense = variants.parse("dense")
    everything = dataclasses.replace(variants.parse(SNAPKV), label="all")
    [pool] = pools_of(tiny, [dense, everything], 14)
    bench = sweep.Bench(tiny, pool, 32, 1, 8, 9)
    bench.base.prefill(1, item.context[:-1])
    found = local.logprobs(bench, dense, item)
    assert local.logprobs(bench, everything, item) == pytest.approx(found)
    for choice, value in zip(item.choices, found, strict=True):
        whole, total = [*item.context, *choice], 0.0
        for place in range(len(item.context), len(whole)):
            logits = np.asarray(bench.base.prefill(2, whole[:place]).logits)[0].astype(np.float64)
            total += logits[whole[place]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert value == pytest.approx(total, abs=1e-3)


# Command


def test_lengths_and_counts():
    assert command.length_and_count("7000:8") == (7000, 8)
    for bad in ("7000", "0:1", "a:1", "7:"):
        with pytest.raises(command.argparse.ArgumentTypeError):
            command.length_and_count(bad)


def test_labels_are_unique_and_controls_have_the_budgets_of_what_evicts():
    same = [SNAPKV, SNAPKV.replace("window_size=8", "window_size=4")]
    chosen = command.choose(command.arguments_of(["--methods", *same, "quest(decode_keep_tokens=99)", "fp8_kv"]))
    assert [v.label for v in chosen] == [
        "dense",
        "random eviction 64",
        "shuffled positions",
        "snapkv 64 observation_window_size=8",
        "snapkv 64 observation_window_size=4",
        "quest 675",
        "fp8_kv",
    ]
    assert not [v for v in command.choose(command.arguments_of(["--no-controls"])) if v.control]
    with pytest.raises(SystemExit, match="did you mean 'quest'"):
        command.choose(command.arguments_of(["--methods", "quset"]))


def test_pictures_and_pages_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "q.md").write_text("")
    with pytest.raises(SystemExit):
        command.arguments_of(["--json", str(tmp_path / "q.json")])
    assert "q.md exists" in capsys.readouterr().err
    command.arguments_of(["--json", str(tmp_path / "q.json"), "--force"])
