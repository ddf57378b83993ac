"""Conversations that benchmarks.prefix_prune prunes, and what its numbers mean on answers made by hand."""

from __future__ import annotations

import argparse
import json
import math

import pytest

from benchmarks import conversation, prefix_prune, prune_cases
from benchmarks.prune_cases import Found
from benchmarks.quality.tasks import Vocabulary
from tests.benchmarks.test_smoke import run

WORDS = ("apple", "banana", "copper", "dragon", "eagle")
VOCABULARY = Vocabulary(WORDS, (1, 2, 3, 4, 5), ())


def test_a_case_asks_for_what_stays_and_for_what_goes():
    for seed in range(20):
        case = prune_cases.make_case(VOCABULARY, 6, 20, 0.5, seed)
        assert case == prune_cases.make_case(VOCABULARY, 6, 20, 0.5, seed)
        assert len(case.pruned) == 3
        assert {case.history[i]["role"] for i in case.pruned} == {"tool"}
        texts = [json.loads(m["content"])["text"] if m["role"] == "tool" else "" for m in case.history]
        for question, goes in ((case.kept, False), (case.gone, True)):
            ask, lead = question.messages
            assert (ask["role"], lead["role"]) == ("user", "assistant")
            (place,) = [i for i, text in enumerate(texts) if f'{lead["content"]} {WORDS[question.word]}"' in text]
            assert (place in case.pruned) == goes
        assert [
            sum("password of" in texts[i] for i in range(len(texts)) if (i in case.pruned) == goes) for goes in (0, 1)
        ] == [2, 2]
    with pytest.raises(ValueError, match="1 of 6 results go"):
        prune_cases.make_case(VOCABULARY, 6, 20, 0.2, 0)


def test_an_edited_case_says_less():
    case = prune_cases.make_case(VOCABULARY, 6, 20, 0.5, 3)
    changed = [i for i, (a, b) in enumerate(zip(case.history, case.edited, strict=True)) if a != b]
    assert tuple(changed) == case.pruned
    assert {case.edited[i]["content"] for i in changed} == {"(removed)"}


def test_a_transcript_has_its_results_at_odd_places():
    script = conversation.script(lambda text: len(text.split()), 4, 30, 0)
    messages = prune_cases.transcript(script)
    assert [m["role"] for m in messages] == ["system", "user", *["assistant", "tool"] * 3]
    assert tuple(m["content"] for m in messages[3::2]) == script.results


def test_the_oldest_results_go():
    tokens = {3: 100, 5: 100, 7: 100, 9: 100, 11: 100}
    assert prune_cases.oldest(tokens, 0.6) == [3, 5, 7]
    assert prune_cases.oldest(tokens, 0.61) == [3, 5, 7, 9]
    assert prune_cases.oldest(tokens, 0.0) == []


def test_shared_tokens_are_counted_once():
    # 100 shared tokens in blocks of 16: 96 can be taken over.
    found = prune_cases.sharing(100, 16, [(120, 0), (130, 96), (125, 96)])
    assert found["prefilled_tokens"] == 120 + 34 + 29
    assert found["suffix_tokens"] == 20 + 30 + 25
    assert found["most_prefilled"] == 100 + 24 + 34 + 29
    assert found["prefilled_without"] == 375


def test_sides_are_compared_case_by_case():
    full = [Found(-0.1, 1), Found(-0.2, 1), Found(-0.3, 1)]
    found = prune_cases.compare([Found(-0.1, 1, 90, 50), Found(-0.22, 1, 90, 50), Found(-2.3, 3, 90, 50)], full)
    assert found["ranked_first"][0] == pytest.approx(2 / 3)
    assert found["within_5_percent"][0] == pytest.approx(2 / 3)
    assert found["worst_logprob_over_full"] == pytest.approx(-2.0)
    assert found["probability_over_full"] == pytest.approx(math.exp(-2.02 / 3))
    assert (found["cached_tokens"], found["resident_tokens"]) == (90, 50)


def test_answers_of_both_kinds():
    pairs = [(Found(-0.1, 1), Found(-0.2, 1))] * 2
    lost = [(Found(-0.1, 1), Found(-5.2, 21)), (Found(-0.1, 1), Found(-0.2, 1))]
    found = prune_cases.answers({"full": pairs, "drop": lost})
    assert found["drop"]["ranked_first"][0] == 1.0
    assert found["drop"]["gone"]["ranked_first"][0] == 0.5
    assert found["drop"]["gone"]["worst_logprob_over_full"] == pytest.approx(-5.0)
    assert found["full"]["gone"]["ranked_first"][0] == 1.0


def result(prefilled=200, over=6.0, kept=0.995, behind=0, freed=1000, cached=0, first=1.0, cases=30):
    side = {"history_tokens": [6000], "freed_tokens": [freed], "kept_share": [kept], "cached_tokens": [5900]}
    whole = side | {"cached_tokens": [cached], "freed_tokens": [0]}
    sides = {"path": side, "chain": side, "whole": whole, "edited": whole | {"cached_behind_cut": [behind]}}
    ratios = {name: {"edited": {"ratio": over}} for name in ("path", "chain")}
    sharing = {"requests": 64, "prefilled_tokens": prefilled, "most_prefilled": 200, "ttft_over": {"ratio": 9.0}}
    full = {"cases": cases, "ranked_first": [1.0], "cached_tokens": 0, "resident_tokens": 0}
    drop = {"cases": cases, "ranked_first": [first], "cached_tokens": 90, "resident_tokens": 40}
    quality = {"sides": {"full": full, "edited": full, "drop": drop}}
    return {"sharing": sharing, "pruning": {"sides": sides, "over": ratios}, "quality": quality}


def test_goals():
    assert all(one["met"] for one in prune_cases.goals(result()))
    missed = prune_cases.goals(result(prefilled=201, over=4.9, kept=0.98, behind=16, first=0.9))
    assert [one["met"] for one in missed] == [False, True, False, False, False, False, False, False]
    assert prune_cases.goals({}) == []


def test_what_makes_a_run_invalid():
    options = argparse.Namespace(quick=False, cases=30)
    assert prefix_prune.reasons(result(), options) == []
    assert prefix_prune.reasons(result(freed=0), options) == ["nothing was pruned"]
    assert prefix_prune.reasons(result(cached=16), options) == ["tokens were cached where none should be"]
    assert prefix_prune.reasons(result(cases=29), options) == ["29 cases that the whole text answers, fewer than 30"]
    unpruned = result()
    unpruned["quality"]["sides"]["drop"]["resident_tokens"] = 90
    unpruned["pruning"]["sides"]["path"]["history_tokens"] = [5000]
    assert prefix_prune.reasons(unpruned, options) == [
        "a conversation has 5000 tokens, fewer than 5,500",
        "drop: answers did not come from pruned rows",
    ]


@pytest.mark.slow
def test_it_runs(tmp_path):
    found = run("prefix_prune", tmp_path, "--quick")
    assert found["valid"]
    assert set(found["pruning"]["sides"]) == {"path", "chain", "edited", "unpruned", "whole"}
    assert found["sharing"]["prefilled_tokens"] <= found["sharing"]["most_prefilled"]
    assert found["quality"]["sides"]["drop"]["cases"] == 2
