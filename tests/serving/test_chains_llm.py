"""Chains from Python: what a conversation reuses, what ends it, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sparsejax.cache.chain import digest_of
from sparsejax.chat import Local
from sparsejax.engine import Engine
from sparsejax.errors import ChainDisabledError, ChainGoneError, ChainMismatchError, RequestError
from sparsejax.llm import LLM, Completion
from sparsejax.mock import EOS, MockRunner
from sparsejax.request import ChainOptions, ChainReport, SamplingParams
from sparsejax.settings import EngineSettings
from tests.serving.mocks import MockBuilt, say_script


def make(**settings: Any) -> LLM:
    runner = MockRunner(script=say_script, step_s=0.001)
    return LLM.from_built(MockBuilt(runner, Engine(runner, EngineSettings(**settings))))


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made


def turn(llm: LLM, prompt: Any, chain: ChainOptions | None = None, **params: Any) -> tuple[Completion, ChainReport]:
    options = ChainOptions() if chain is None else chain
    (answer,) = llm.generate(prompt, SamplingParams(max_tokens=50, **params), progress=False, chain=options)
    assert answer.chain is not None
    return answer, answer.chain


def test_a_conversation_is_computed_once(llm: LLM) -> None:
    first, report = turn(llm, "say:one\n")
    prompt = len(first.prompt_ids)
    assert (report.status, report.reused_tokens, report.prefilled_tokens) == ("created", 0, prompt)
    assert (report.miss, report.state, report.total_tokens) == ("cold", "idle", prompt + 4)
    assert report.processed_tokens == prompt + 3  # the last token has no row yet
    context = [*first.prompt_ids, *first.token_ids, *b"say:two\n"]
    second, report = turn(llm, context, ChainOptions(report.chain_id, on_miss="error"))
    assert second.text == "two"
    assert (report.status, report.reused_tokens) == ("resumed", prompt + 3)
    assert report.restored_from == "device"
    assert second.stats.cached_tokens == report.reused_tokens
    assert report.prefilled_tokens == len(context) - report.reused_tokens


def test_appending_needs_the_new_text_only(llm: LLM) -> None:
    first, report = turn(llm, "say:one\n")
    ledger = [*first.prompt_ids, *first.token_ids]
    believed = {"expected_tokens": len(ledger), "expected_digest": digest_of(np.asarray(ledger))}
    second, report = turn(llm, "say:two\n", ChainOptions(report.chain_id, append=True, **believed))
    assert (second.text, report.reused_tokens) == ("two", len(ledger) - 1)
    assert report.prefilled_tokens == 1 + len("say:two\n")
    assert second.stats.prompt_tokens == len(ledger) + len("say:two\n")
    with pytest.raises(ChainMismatchError, match=f"has {report.total_tokens} tokens, not 3"):
        turn(llm, "x", ChainOptions(report.chain_id, append=True, expected_tokens=3))
    with pytest.raises(ChainMismatchError, match="another digest"):
        turn(llm, "x", ChainOptions(report.chain_id, append=True, expected_digest=b"0" * 32))


def test_what_does_not_fit_behind_a_chain_is_generated_up_to_the_end(llm: LLM) -> None:
    _, report = turn(llm, "say:one\n")
    window = llm.limits.geometry.max_model_len
    chain = ChainOptions(report.chain_id, append=True)
    params = SamplingParams(max_tokens=window)
    (answer,) = llm.generate("say:two\n", params, progress=False, chain=chain)
    assert answer.text == "two"


def test_the_token_that_ends_an_answer_is_written_once(llm: LLM) -> None:
    first, report = turn(llm, "say:one\n")
    assert first.token_ids[-1] == EOS
    joint = [EOS, *b"say:two\n"]
    second, report = turn(llm, joint, ChainOptions(report.chain_id, append=True, append_joint=True))
    assert second.stats.prompt_tokens == len(first.prompt_ids) + len(first.token_ids) + len(joint) - 1
    _, report = turn(llm, "say:three\n", stop=("r",))
    cut = report.total_tokens
    third, report = turn(llm, joint, ChainOptions(report.chain_id, append=True, append_joint=True))
    assert third.stats.prompt_tokens == cut + len(joint), "an answer that was cut off gets its end"


def test_a_stop_string_leaves_what_was_seen(llm: LLM) -> None:
    first, report = turn(llm, "say:hello wide world\n", stop=(" wo",))
    prompt = len(first.prompt_ids)
    assert first.text == "hello wide"
    assert (report.state, report.total_tokens) == ("idle", prompt + len("hello wide"))
    context = [*first.prompt_ids, *b"hello wide web\nsay:x\n"]
    _, again = turn(llm, context, ChainOptions(report.chain_id, on_miss="error"))
    assert again.reused_tokens == report.processed_tokens


def test_a_stop_string_in_the_last_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=len("hello wide wo"), stop=(" wo",))
    (first,) = llm.generate("say:hello wide world\n", params, progress=False, chain=ChainOptions())
    assert (first.text, first.outputs[0].finish_reason) == ("hello wide", "stop")
    assert first.chain is not None
    assert first.chain.total_tokens == len(first.prompt_ids) + len("hello wide")
    assert first.chain.processed_tokens == len(first.prompt_ids)
    second, report = turn(llm, "say:on\n", ChainOptions(first.chain.chain_id, append=True))
    assert second.text == "on"
    prompt = len(first.prompt_ids)
    assert prompt <= report.reused_tokens <= prompt + len("hello wide"), "what was shown is in the prefix cache"


def test_a_stop_string_that_is_part_of_the_text_is_kept(llm: LLM) -> None:
    params = {"stop": ("de",), "include_stop_str_in_output": True}
    first, report = turn(llm, "say:abcdefgh\n", **params)
    assert first.text == "abcde"
    assert report.total_tokens == len(first.prompt_ids) + len("abcde")


def test_several_prompts_have_a_chain_each(llm: LLM) -> None:
    answers = llm.generate(["say:a\n", "say:b\n"], progress=False, chain=ChainOptions(lookup=False))
    ids = [a.chain.chain_id for a in answers if a.chain]
    assert len(set(ids)) == 2
    answers = llm.generate(["say:c\n", "say:d\n"], progress=False, chain=[ChainOptions(ids[0], append=True), None])
    assert answers[0].chain is not None
    assert answers[0].chain.chain_id == ids[0]
    assert answers[1].chain is None
    with pytest.raises(RequestError, match="1 chains for 2 prompts"):
        llm.generate(["a", "b"], progress=False, chain=[ChainOptions()])


def test_refusals(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n must be 1"):
        turn(llm, "x", n=2)
    with pytest.raises(RequestError, match="append"):
        llm.chat([{"role": "user", "content": "x"}], progress=False, chain=ChainOptions("y", append=True))
    _, report = turn(llm, "say:x\n")
    llm.built.engine.ask(lambda chains: chains.index.drop(chains.index.find(report.chain_id), "deleted")).result(5)
    with pytest.raises(ChainGoneError, match="deleted") as caught:
        turn(llm, "x", ChainOptions(report.chain_id, append=True))
    assert (caught.value.reason, caught.value.recovery) == ("deleted", "resend_full")
    with make(chain_cache=False) as off, pytest.raises(ChainDisabledError, match="--chain-cache"):
        turn(off, "x")


def test_a_chain_outlives_a_cancelled_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": "on and on"}]
    answer: Any = llm.stream_chat(messages, SamplingParams(max_tokens=500), chain=ChainOptions())
    with contextlib.closing(answer) as deltas:
        first = next(deltas)
        assert first.chain is not None
        assert (first.chain.state, first.piece.token_ids) == ("active", ())
        for _ in range(5):
            next(deltas)
    chain_id = first.chain.chain_id

    def look() -> Any:
        return llm.built.engine.ask(lambda chains: chains.index.find(chain_id)).result(5)

    for _ in range(1000):
        if not (chain := look()).busy:
            break
    assert chain.quality.interrupted
    assert chain.processed > len("user:on and on")


def test_the_chat_in_the_terminal_goes_on_with_its_chain(llm: LLM) -> None:
    local = Local(llm, max_tokens=20)
    messages = [{"role": "user", "content": "say:one"}]
    said = "".join(local.answer(messages))
    assert (said, local.cost.cached_tokens) == ("one", 0)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "say:two"}]
    assert "".join(local.answer(messages)) == "two"
    assert local.cost.cached_tokens > 0
    assert "reused" in local.cost.line()
