"""Conversations of the chain benchmarks, and what their numbers mean on answers made by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random

import pytest

from benchmarks import agents, chain_recall, chain_turns, conversation, recall_cases, turn_rows
from benchmarks.agents import Done
from benchmarks.chain_recall import Found
from benchmarks.load import client
from benchmarks.served import Conversation, without_opening
from benchmarks.turn_rows import Row, Side
from tests.benchmarks.test_smoke import run


def words(text: str) -> int:
    return len(text.split())


# Scripts


def test_a_script_is_the_same_for_the_same_seed():
    first, again, other = (conversation.script(words, 5, 30, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.system == other.system
    assert first.goal != other.goal
    assert set(first.results).isdisjoint(other.results)
    assert first.turns == 5


@pytest.mark.parametrize("tokens", [30, 200])
def test_results_are_as_long_as_asked_for(tokens):
    made = conversation.script(words, 6, tokens, 3)
    assert [words(result) for result in made.results] == [tokens] * 5
    pages = [json.loads(result) for result in made.results]
    assert [page["page"] for page in pages] == list(range(pages[0]["page"], pages[0]["page"] + 5))
    assert len({page["text"] for page in pages}) == 5, "a page says what another one says"


def test_a_result_needs_room_for_a_word():
    with pytest.raises(ValueError, match="no room"):
        conversation.script(words, 2, 6, 0)


def test_a_goal_is_filled_with_prose():
    short, long = (conversation.script(words, 1, 30, 4, goal) for goal in (0, 150))
    assert words(long.goal) == 150
    assert long.goal.startswith(short.goal)


# Transcripts


def talk(turns: int = 3, chain: dict | None = None) -> Conversation:
    return Conversation(conversation.script(words, turns, 30, 0), {"model": "m", "max_tokens": 4}, chain)


def test_a_conversation_grows_by_a_result_and_an_answer():
    one = talk(chain={"x": 1})
    assert [m["role"] for m in one.before(1)] == ["system", "user"]
    one.take("first", {"id": "chain_a"})
    one.take("second", {"id": "chain_b"})
    body = json.loads(one.ask().body)
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert [m["content"] for m in body["messages"][2::2]] == ["first", "second"]
    assert body["messages"][-1]["content"] == one.script.results[1]
    assert (body["chain"], body["chain_id"], body["x"], body["stream"]) == (True, "chain_b", 1, True)
    earlier = json.loads(one.ask(2).body)["messages"]
    assert earlier == body["messages"][:4]
    one.take("third")
    with pytest.raises(ValueError, match="turn 4 of 3"):
        one.ask()


def test_a_conversation_without_chains_names_none():
    one = talk()
    one.take("first", {"id": "chain_a"})
    body = json.loads(one.ask().body)
    assert {key: value for key, value in body.items() if "chain" in key} == {"chain": False}


def test_texts_are_counted_without_what_opens_a_prompt():
    counted = without_opening(lambda text: 1 + words(text))
    assert [counted("a b"), counted("")] == [2, 0]


# Turns


def row(turn, ttft, short=False, number=0, prompt=6000, cached=5800, side="snapkv 512") -> Row:
    return Row(side, number, turn, short, ttft, prompt, cached, 16, "a", "resumed")


ROWS = [
    row(29, 0.5),
    row(29, 0.4, short=True, prompt=700, cached=500),
    row(30, 0.6),
    row(30, 0.5, short=True, prompt=700, cached=500),
    row(30, 0.9, number=1),
    row(30, 0.6, number=1, short=True, prompt=700, cached=500),
    row(1, 3.0, cached=0),
]


def test_long_turns_are_compared_with_the_short_one_of_their_round():
    last = turn_rows.late(ROWS, 30)
    assert last["turns"] == [30]
    assert last["over_short"] == pytest.approx({"ratio": 0.75 / 0.55, "least_pair": 1.2, "largest_pair": 1.5})
    assert (last["prefilled_tokens"], last["short_prefilled_tokens"]) == (200, 200)
    assert turn_rows.late(ROWS)["ttft_s"]["samples"] == 3
    assert turn_rows.late(ROWS[-1:]) is None


def test_turns_keep_what_every_round_gave():
    first, late, last = turn_rows.by_turn(ROWS)
    assert (first["turn"], first["cached_tokens"]) == (1, [0])
    assert late["ttft_s"] == [0.5]
    assert last["ttft_s"] == [0.6, 0.9]


CHAINED, PLAIN = Side("snapkv 512", "s"), Side("dense, no chains", "dense", chained=False)


def test_what_makes_turns_invalid():
    assert turn_rows.reasons([CHAINED], ROWS, [], 30, 6000) == []
    assert turn_rows.reasons([CHAINED], ROWS, [1], 30, 6000) == ["1 requests failed"]
    assert turn_rows.reasons([CHAINED, PLAIN], ROWS, [], 30, 6000) == ["dense, no chains has no turn 30"]
    assert "ends at 6,016 tokens" in turn_rows.reasons([CHAINED], ROWS, [], 30, 7000)[0]
    cold = [*ROWS, row(7, 1.0, cached=0)]
    assert turn_rows.reasons([CHAINED], cold, [], 30, 6000) == ["snapkv 512 took nothing over in 1 turns"]
    warm = [row(30, 1.0, side=PLAIN.name)]
    assert turn_rows.reasons([PLAIN], warm, [], 30, 6000) == ["dense, no chains took something over"]
    other = [row(30, 0.6, cached=5000), row(30, 0.5, short=True, prompt=700, cached=500)]
    assert "not the same message" in turn_rows.reasons([CHAINED], other, [], 30, 6000)[0]


def test_goals_of_turns():
    def side(ratio, chained=True):
        return {"chained": chained, "last": {"over_short": {"ratio": ratio}}}

    sides = {"snapkv 512": side(1.2), "h2o 512": side(1.4), "dense": side(2.0), "dense, no chains": side(2.9, False)}
    restart = {"cached_tokens": 90, "unkilled_cached_tokens": 90, "same_text": [True, True]}
    killed = {"snapkv 512": restart, "h2o 512": restart | {"same_text": [True, False]}}
    found = turn_rows.goals({"sides": sides, "restart": {"sides": killed}})
    assert [one["met"] for one in found] == [True, False, False, True, False]
    assert found[3]["found"] == "90 of 90 tokens taken over, 2 of 2 answers the same"
    lost = turn_rows.goals({"sides": {}, "restart": {"sides": {"x": restart | {"cached_tokens": 0}}}})
    assert [one["met"] for one in lost] == [False]


def test_the_picture_and_the_table_have_all_sides():
    sides = {name: {"turns": turn_rows.by_turn(ROWS), "last": turn_rows.late(ROWS, 30)} for name in ("one", "two")}
    drawn = turn_rows.plot({"sides": sides})
    assert drawn.count("<polyline") == 2
    lines = chain_turns.table({"sides": sides | {"three": {"turns": [], "last": None}}}).splitlines()
    assert [line.split()[0] for line in lines] == ["side", "one", "two"]
    assert lines[1].split()[1:] == ["6000", "200", "750", "550", "1.36", "1.20", "to", "1.50"]


# Agents


def answer(prompt, cached, output=4, status="resumed", sent=0.0, end=1.0, **chain) -> client.Answer:
    facts = {"status": status, "id": "chain_x", **chain}
    return client.Answer(sent, end, (end,), prompt, output, "usage", cached, None, "a b", facts)


def test_what_agents_must_compute():
    # 100 shared tokens; agent 0 begins with them, agent 1 takes them over; then each goes on.
    done = {
        (0, 1): answer(130, 0),
        (1, 1): answer(120, 100),
        (0, 2): answer(160, 133),
        (1, 2): answer(150, 100),
    }
    assert agents.needed(done) == 30 + 20 + 27 + 27
    found = agents.chains([Done(agent, turn, one) for (agent, turn), one in done.items()])
    assert found["lost_chains"] == 1, "agent 1 had 123 tokens and took over 100"
    assert (found["first_turns_with_reuse"], found["first_turns"], found["first_turn_reused_tokens"]) == (1, 2, 100)
    assert found["prefilled_tokens"] == 130 + 20 + 27 + 50
    assert found["prefilled_over_needed"] == pytest.approx(227 / 104)
    assert found["restored_from"] == {"device": 4}
    assert found["longest_context"] == 164


BROKEN = client.Failure("HTTP 503", "no room", 0.0, 0.5)


def test_failures_are_not_throughput():
    found = agents.side_of([Done(0, 1, answer(10, 0)), Done(1, 1, BROKEN)], [2.0, 2.0])
    assert (found["requests"], found["failed_requests"], found["failures"]) == (2, 1, {"HTTP 503": 1})
    assert found["requests_per_s"] == 0.25
    assert found["output_tokens_per_s"] == 1.0
    assert found["peak_concurrency"] == 2


def test_sides_are_compared_part_by_part():
    one = Done(0, 1, answer(10, 0))
    found = agents.over([[one] * 8, [one] * 8], [[one] * 2, [one, one, Done(1, 1, BROKEN)]], [[1.0, 2.0], [1.0, 1.0]])
    assert found == pytest.approx({"ratio": (16 / 3) / (4 / 2), "least_part": 2.0, "largest_part": 4.0})
    assert agents.over([[one]], [[Done(1, 1, BROKEN)]], [[1.0], [1.0]]) is None


def test_the_sample_is_spread_over_turns():
    done = [Done(agent, turn, answer(10, 0)) for agent in range(10) for turn in (3, 4, 5)]
    found = agents.drawn(random.Random(0), done, 12)
    assert len(set(found)) == 12
    assert [sum(turn == t for _, turn in found) for t in (3, 4, 5)] == [4, 4, 4]
    assert found == agents.drawn(random.Random(0), done, 12)
    assert len(agents.drawn(random.Random(0), done, 99)) == 30
    assert agents.drawn(random.Random(0), [Done(0, 1, BROKEN)], 5) == []


def result(failed=0, resumed=5, lost=0, reuse=1, cached=0, ratio=3.5, turns=8):
    chains = {"failed_requests": failed, "requests": 8, "turns": turns, "status": {"resumed": resumed}}
    chains |= {"lost_chains": lost, "first_turns_with_reuse": reuse, "first_turns": 2}
    plain = {"failed_requests": 0, "requests": 3, "cached_tokens": cached}
    return {"chains": chains, "no_chains": plain, "over": None if ratio is None else {"ratio": ratio}}


def test_what_makes_a_run_of_agents_invalid():
    assert agents.reasons(result(), 2, 4) == []
    assert agents.reasons(result(failed=1, turns=7), 2, 4) == [
        "1 of 8 requests failed, chains",
        "7 of 8 turns were answered",
    ]
    assert agents.reasons(result(cached=9), 2, 4) == ["9 tokens were taken over without chains"]
    assert agents.reasons(result(resumed=0), 2, 4) == ["no turn resumed a chain"]


def test_goals_of_agents():
    assert all(one["met"] for one in agents.goals(result()))
    assert [one["met"] for one in agents.goals(result(1, lost=1, reuse=0, ratio=2.9))] == [False] * 4
    assert agents.goals(result(ratio=None))[-1] == {
        "goal": "requests per second at least 3x without chains",
        "found": None,
        "met": False,
    }


def test_a_run_that_is_stopped_has_the_numbers_of_its_parts():
    turns = {1: answer(100, 0), 2: answer(200, 103)}
    chained = [Done(agent, turn, one) for agent in (0, 1) for turn, one in turns.items()]
    found = agents.summed([[chained], [chained[:1]]], [[2.0], [1.0]], [0.25], 2, 2)
    assert found["valid"], found["invalid_because"]
    assert (found["answered_turns"], found["chains"]["turns"], found["over"]["ratio"]) == (2, 4, 2.0)
    assert found["others_cpu_share"] == [0.25]
    assert agents.summed([[chained], [chained[:1]]], [[2.0], [1.0]], [0.25], 2, 3)["invalid_because"] == [
        "4 of 6 turns were answered"
    ]


class Echo:
    """A server that answers each request after a moment; the fifth one fails."""

    def __init__(self) -> None:
        self.active = self.peak = self.count = 0
        self.bodies: list[dict] = []

    async def send(self, ask: client.Ask) -> client.Record:
        self.active += 1
        self.peak = max(self.peak, self.active)
        await asyncio.sleep(0.001)
        self.active -= 1
        self.count += 1
        body = json.loads(ask.body)
        self.bodies.append(body)
        if self.count == 5:
            return client.Record(ask, 0.0, 0.0, 1.0, (), "HTTP 503", "no room")
        chunks = [
            {"choices": [{"delta": {"content": f"answer {self.count}"}}]},
            {
                "choices": [],
                "usage": {"prompt_tokens": 9, "completion_tokens": 2},
                "chain": {"id": body.get("chain_id") or f"chain_{self.count}", "status": "resumed"},
            },
        ]
        lines = tuple((0.5, json.dumps(chunk).encode()) for chunk in chunks)
        return client.Record(ask, 0.0, 0.0, 1.0, (*lines, (0.6, b"[DONE]")))


def test_agents_take_turns_and_go_on_with_their_chain():
    options = argparse.Namespace(concurrency=2, output_tokens=4, extra_body={"k": 1}, seed=0, think_s=0.0)
    scripts = [conversation.script(words, 3, 30, seed) for seed in range(3)]
    echo = Echo()

    async def live():
        fleet = agents.Fleet(options, scripts, {"sparse_method": "snapkv"}, 7)
        return fleet, await fleet.live(echo, 2), await fleet.again(echo, [(0, 1), (2, 2)])

    fleet, done, again = asyncio.run(live())
    assert echo.peak == 2
    assert [(one.agent, one.turn) for one in done] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]
    assert sum(one.answer is None for one in done) == 1
    assert sorted(talk.turn for talk in fleet.talks) == [1, 2, 2]
    ids = [body.get("chain_id") for body in echo.bodies[:6]]
    assert ids[:3] == [None] * 3, "an agent had two turns before another one had its first"
    assert None not in ids[3:]
    assert len(set(ids[3:])) == 3
    plain = echo.bodies[6:]
    assert [one.turn for one in again] == [1, 2]
    assert sorted(len(body["messages"]) for body in plain) == [2, 4]
    assert not any("chain_id" in body or body["chain"] for body in plain)
    assert all(body["chain"] and body["chain_shared_tokens"] == 7 for body in echo.bodies[:6])
    assert all((body["k"], body["sparse_method"], body["min_tokens"]) == (1, "snapkv", 4) for body in echo.bodies)


# Recall


@pytest.fixture(scope="module")
def tokenizer():
    from sparsejax.models.load.dummy import dummy_tokenizer

    return dummy_tokenizer(256)


def test_a_case_states_its_fact_in_the_second_turn_alone(tokenizer):
    from benchmarks import common
    from benchmarks.quality.tasks import Vocabulary

    vocabulary = Vocabulary.of(lambda text: tokenizer.encode(text, add_special_tokens=False), common.prose())
    case = recall_cases.make_case(tokenizer, vocabulary, 8, 40, 5)
    assert len(case.contexts) == 8
    for before, after in zip(case.contexts, case.contexts[1:], strict=False):
        assert after[: len(before)] == before
    assert case.fact.start >= len(case.contexts[0])
    assert case.fact.stop < len(case.contexts[1])
    ids = case.contexts[-1]
    stated = tokenizer.decode([ids[i] for i in case.fact])
    text = tokenizer.decode(ids)
    assert text.count(stated) == 1
    assert text.count("The password of the ") == 3 + 1, "three facts, and the beginning of the answer"
    asked = text.rpartition("What is the password of the ")[2].partition("?")[0]
    assert stated.startswith(f'The password of the {asked} is "{asked} ')
    value = stated.removeprefix(f'The password of the {asked} is "{asked}')
    assert value.startswith(tokenizer.decode([*vocabulary.glue, case.answer]))
    assert case == recall_cases.make_case(tokenizer, vocabulary, 8, 40, 5)
    assert case.contexts != recall_cases.make_case(tokenizer, vocabulary, 8, 40, 6).contexts


def test_where_a_part_lies():
    assert recall_cases.span([5, 1, 2, 1, 2, 3], [1, 2, 3]) == range(3, 6)
    with pytest.raises(ValueError, match="not those"):
        recall_cases.span([1, 2], [3])


def test_within_5_percent_of_dense():
    dense = Found(-0.5, 1)
    assert chain_recall.close(Found(-0.5 + math.log(0.96), 1), dense)
    assert not chain_recall.close(Found(-0.5 + math.log(0.94), 1), dense)
    assert not chain_recall.close(Found(-0.4, 2), dense)


def test_a_side_is_compared_case_by_case():
    dense = [Found(-0.1, 1), Found(-0.3, 1)]
    found = chain_recall.compare([Found(-0.1, 1), Found(-2.3, 21)], dense)
    assert found["probability_over_dense"] == pytest.approx(math.exp(-1.0))
    assert found["worst_logprob_over_dense"] == pytest.approx(-2.0)
    assert (found["ranked_first"][0], found["within_5_percent"][0], found["median_rank"]) == (0.5, 0.5, 11)


def test_sides_have_what_every_case_gave():
    sides = [chain_recall.Side("dense", "dense"), chain_recall.Side("a, off", "a")]
    sides.append(chain_recall.Side("a, recall 64", "a", "host", 64))
    lent = {"evicted_rows": 90, "lent_rows": 60, "bytes_moved": 10, "seconds": 0.5, "stored_bytes": 20}
    found = {
        "dense": [Found(-0.5, 1), Found(-0.1, 1)],
        "a, off": [Found(-9.0, 21, held=0.25), Found(-8.0, 15, held=0.0)],
        "a, recall 64": [Found(-0.5, 1, recall=lent), Found(-0.1, 1, recall=lent | {"lent_rows": 40})],
    }
    result = chain_recall.summed(sides, found, 3, 2)
    assert result["valid"], result["invalid_because"]
    assert (result["cases"], result["tried"]) == (2, 3)
    assert result["sides"]["a, off"]["fact_rows_held"] == 0.125
    assert result["sides"]["a, off"]["ranks"] == [21, 15]
    assert result["sides"]["a, recall 64"]["recall_means"]["lent_rows"] == 50
    assert result["sides"]["a, recall 64"]["taken_back"] == 1
    assert [goal["met"] for goal in result["goals"]] == [True] * 5
    assert chain_recall.summed(sides, found, 3, 4)["invalid_because"] == ["2 cases that dense solves, fewer than 4"]


def test_goals_of_recall():
    def side(recall, first, ratio, back):
        return {"recall": recall, "ranked_first": (first,), "probability_over_dense": ratio, "taken_back": back}

    dense = side("off", 1.0, 1.0, None)
    sides = {"dense": dense, "a, off": side("off", 0.0, 0.2, None), "a, recall 64": side("host", 0.98, 0.97, 0.96)}
    assert [one["met"] for one in chain_recall.goals(sides)] == [True] * 5
    sides = {"dense": dense, "a, off": side("off", 0.95, 0.96, None), "a, recall 64": side("host", 0.94, 0.9, 0.8)}
    assert [one["met"] for one in chain_recall.goals(sides)] == [False] * 5


def test_what_recall_takes_back():
    off = {"spec": "a", "recall": "off", "logprob_over_dense": -10.0}
    other = {"spec": "b", "recall": "off", "logprob_over_dense": -2.0}
    lent = {"spec": "a", "recall": "host", "logprob_over_dense": -0.5}
    assert chain_recall.taken_back({"x": off, "y": other, "z": lent}, lent) == pytest.approx(0.95)


def test_what_makes_recall_invalid():
    sides = {"dense": {}, "a, off": {"fact_rows_held": 0.6}}
    assert chain_recall.reasons({"cases": 3, "sides": sides}, 4) == [
        "3 cases that dense solves, fewer than 4",
        "a, off still held 60% of the fact's rows: it was not dropped",
    ]
    assert chain_recall.reasons({"cases": 4, "sides": {"dense": {}, "a, off": {"fact_rows_held": 0.1}}}, 4) == []


def test_recall_budgets_are_rows_or_all():
    assert [chain_recall.budget(text) for text in ("64", "all")] == [64, "all"]
    with pytest.raises(argparse.ArgumentTypeError):
        chain_recall.budget("some")


# Against servers of our own, with random weights


@pytest.mark.slow
def test_turns_of_a_killed_server_go_on(tmp_path):
    found = run("chain_turns", tmp_path, "--quick", "--plot", tmp_path / "turns.svg")
    assert found["valid"], found["invalid_because"]
    assert set(found["sides"]) == {"snapkv 128", "h2o 128", "streamingllm 128", "dense", "dense, no chains"}
    for name, side in found["sides"].items():
        last = side["last"]
        assert last["over_short"]["ratio"] > 0
        if side["chained"]:
            assert [turn["turn"] for turn in side["turns"]] == [1, 2, 3, 4, 5, 6]
            before, turn = side["turns"][-2:]
            assert turn["cached_tokens"][0] == before["prompt_tokens"][0] + before["output_tokens"][0] - 1, name
            assert last["prefilled_tokens"] == last["short_prefilled_tokens"]
        else:
            assert [turn["turn"] for turn in side["turns"]] == [1, 6]
            assert last["prefilled_tokens"] == last["prompt_tokens"]
    assert found["restart"]["disk_bytes"] > 0
    for one in found["restart"]["sides"].values():
        # What was not written yet when it was killed is computed again.
        assert 0 < one["cached_tokens"] <= one["unkilled_cached_tokens"]
        assert one["same_text"] == [True, True]
    assert (tmp_path / "turns.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.slow
def test_agents_in_a_small_cache(tmp_path):
    found = run("agents", tmp_path, "--quick")
    assert found["valid"], found["invalid_because"]
    chains = found["chains"]
    assert (chains["turns"], chains["lost_chains"], chains["failed_requests"]) == (24, 0, 0)
    assert chains["first_turns_with_reuse"] == 6
    assert chains["prefilled_over_needed"] == pytest.approx(1.0, abs=0.02)
    assert found["no_chains"]["requests"] == 6
    assert found["over"]["ratio"] > 0


@pytest.mark.slow
def test_recall_of_a_random_model(tmp_path):
    found = run("chain_recall", tmp_path, "--quick")
    assert found["cases"] == 2
    assert found["valid"], found["invalid_because"]
    assert found["sides"]["dense"]["within_5_percent"][0] == 1.0
    for name in ("snapkv 64", "h2o 64", "streamingllm 64"):
        assert found["sides"][f"{name}, off"]["fact_rows_held"] < 0.5
        assert found["sides"][f"{name}, recall 64"]["recall_means"]["lent_rows"] > 0
