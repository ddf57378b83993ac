"""Histories over HTTP: clients change what they were given, and the chain goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import LiveServer, Servers

SAID = "<think>hm</think>Paris"


@pytest.fixture
def live(servers: Servers) -> LiveServer:
    return servers.start(check=False)


def ask(live: LiveServer, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 60, **fields}
    answer = live.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"say:{text}"}


def test_reasoning_left_out_costs_nothing(live: LiveServer) -> None:
    messages = [say(SAID)]
    first = ask(live, messages)
    assert first["choices"][0]["message"]["content"] == SAID
    total = first["chain"]["total_tokens"]
    for returned in ("Paris", " Paris\n", [{"type": "text", "text": "Par"}, {"type": "text", "text": "is"}], SAID):
        again = [*messages, {"role": "assistant", "content": returned}, say("more")]
        second = ask(live, again, chain_id=first["chain_id"] if returned == "Paris" else None)
        known = second["chain"]["reused_tokens"]  # of all but the last one, which had no row, and later of more
        assert known == total - 1 if returned == "Paris" else known >= total - 1
        assert second["choices"][0]["message"]["content"] == "more"
        assert second["sparsejax"]["cache_miss"] is None or returned != "Paris"


def test_the_template_as_text_goes_back(live: LiveServer) -> None:
    """Example e: the rewritten answer is computed again, from the end of the prompt on if a state was kept there."""
    messages = [say(SAID)]
    first = ask(live, messages)
    again = [*messages, {"role": "assistant", "content": "Paris"}, say("more")]
    second = ask(live, again, chain_id=first["chain_id"], chain_match="text")
    prompt = first["usage"]["prompt_tokens"]
    assert second["chain"]["reused_tokens"] <= prompt
    assert second["sparsejax"]["cache_miss"]["reason"] == "diverged"
    assert second["usage"]["prompt_tokens"] < first["chain"]["total_tokens"] + 25


def test_ten_turns_and_an_edit(live: LiveServer) -> None:
    messages: list[dict[str, Any]] = []
    totals = [0]
    for turn in range(10):
        messages.append(say(f"<think>{turn}</think>answer {turn}"))
        answer = ask(live, messages)
        assert answer["chain"]["reused_tokens"] == max(0, totals[-1] - 1)
        totals.append(answer["chain"]["total_tokens"])
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    messages[17] = {"role": "assistant", "content": "another answer"}
    edited = ask(live, [*messages, say("x")], chain_id=answer["chain_id"])
    miss = edited["sparsejax"]["cache_miss"]
    assert (miss["reason"], miss["message"]) == ("diverged", 17)
    assert totals[8] <= miss["token"] <= totals[9], "within the ninth turn"


def test_stop_strings_and_streams(live: LiveServer) -> None:
    messages = [say("one two STOP three")]
    events = live.stream(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 60, "stop": [" STOP"], "chain": True}
    )
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert text == "one two"
    again = [*messages, {"role": "assistant", "content": "one two"}, say("more")]
    second = ask(live, again)
    prompt = len("user:say:one two STOP three\nassistant:") + 2
    # The mock may have ended the answer before the engine heard of the stop string.
    assert prompt <= second["chain"]["reused_tokens"] <= prompt + len("one two"), "whole pages, or the chain's state"
    assert second["choices"][0]["message"]["content"] == "more"


def test_append_start_reads_only_what_is_new(live: LiveServer) -> None:
    first = ask(live, [say(SAID)])
    lied = [{"role": "user", "content": "never said"}, {"role": "assistant", "content": "Paris"}, say("more")]
    second = ask(live, lied, chain_id=first["chain_id"], chain_append_start=2)
    assert second["chain"]["reused_tokens"] == first["chain"]["total_tokens"] - 1
    assert second["choices"][0]["message"]["content"] == "more"


def test_text_completions(live: LiveServer) -> None:
    def complete(prompt: str, **fields: Any) -> dict[str, Any]:
        answer = live.post("/v1/completions", {"prompt": prompt, "max_tokens": 30, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = complete("say:one\n")
    text = first["choices"][0]["text"]
    second = complete(f"say:one\n{text} and say:two\n")
    assert second["chain"]["reused_tokens"] >= first["chain"]["total_tokens"] - 1


def test_salts_share_nothing(live: LiveServer) -> None:
    messages = [say(SAID)]
    first = ask(live, messages, cache_salt="a")
    again = [*messages, {"role": "assistant", "content": "Paris"}, say("more")]
    other = ask(live, again, cache_salt="b")
    assert other["chain"]["reused_tokens"] == 0
    assert other["usage"]["prompt_tokens"] < first["chain"]["total_tokens"] + 25, (
        "not a token of the other one's reasoning"
    )
    third = ask(live, again, cache_salt="b", chain_id=first["chain_id"])
    assert third["chain"]["reused_tokens"] < other["usage"]["prompt_tokens"], "what the second request computed"
    assert ask(live, again, cache_salt="a")["chain"]["reused_tokens"] == first["chain"]["total_tokens"] - 1


def test_a_deleted_chain_is_forgotten(live: LiveServer) -> None:
    messages = [say(SAID)]
    first = ask(live, messages)
    assert len(live.state.history.talks) == 1
    assert live.client.delete(f"/v1/chains/{first['chain_id']}").status_code == 200
    again = [*messages, {"role": "assistant", "content": "Paris"}, say("more")]
    second = ask(live, again)
    assert second["chain"]["status"] == "created"
    assert second["usage"]["prompt_tokens"] < first["chain"]["total_tokens"] + 25, "the reasoning is not part of it"
    assert second["chain"]["reused_tokens"] <= first["usage"]["prompt_tokens"], "rows of the text that was sent again"
    assert len(live.state.history.talks) == 1


def test_lookups_see_what_a_turn_would(live: LiveServer) -> None:
    messages = [say(SAID)]
    first = ask(live, messages)
    again = [*messages, {"role": "assistant", "content": "Paris"}, say("more")]
    found = live.post("/v1/chains/lookup", {"messages": again}).json()
    assert found["reused_tokens"] == first["chain"]["total_tokens"] - 1
    assert ask(live, again)["chain"]["reused_tokens"] == found["reused_tokens"]


def test_a_visible_stop_token_is_kept(live: LiveServer) -> None:
    """The id that ended the answer is part of its text, so it is part of the history."""
    messages = [say("one two")]
    stop = {"stop_token_ids": [ord("w")], "include_stop_str_in_output": True}
    first = ask(live, messages, **stop)
    said = first["choices"][0]["message"]
    assert said["content"] == "one tw"
    again = [*messages, {"role": "assistant", "content": "one tw"}, say("more")]
    second = ask(live, again, return_token_ids=True)
    assert b"one tw\n" in bytes(i for i in second["prompt_token_ids"] if i < 256)
    assert second["chain"]["reused_tokens"] == first["chain"]["total_tokens"] - 1
    hidden = ask(live, messages, stop_token_ids=[ord("w")], cache_salt="other")
    assert hidden["choices"][0]["message"]["content"] == "one t"
    again[1] = {"role": "assistant", "content": "one t"}
    second = ask(live, again, return_token_ids=True, cache_salt="other")
    assert b"one t\n" in bytes(i for i in second["prompt_token_ids"] if i < 256)


def test_g_a_cut_answer_goes_on(live: LiveServer) -> None:
    """The history and nothing else: its last token alone is computed."""
    messages = [say("one two three")]
    first = ask(live, messages, max_tokens=5)
    said = first["choices"][0]["message"]["content"]
    assert (said, first["choices"][0]["finish_reason"]) == ("one t", "length")
    again = [*messages, {"role": "assistant", "content": said}]
    second = ask(live, again, continue_final_message=True)
    assert second["chain"]["id"] == first["chain_id"]
    assert second["chain"]["prefilled_tokens"] == 1


def test_h_the_same_question_again(live: LiveServer) -> None:
    """Regenerated answers are other turns of the same prompt; the first answer's chain stays as it is."""
    first = ask(live, [say(SAID)])
    second_messages = [say(SAID), {"role": "assistant", "content": "Paris"}, say("more")]
    second = ask(live, second_messages)
    again = ask(live, second_messages)
    assert again["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert again["chain"]["reused_tokens"] >= first["chain"]["total_tokens"] - 1
    assert again["chain_id"] != second["chain_id"]


def test_kept_reasoning_never_fills_the_window(live: LiveServer) -> None:
    """A conversation that fits as the template writes it is answered, though its chain has more."""
    window = live.runner.limits.geometry.max_model_len
    messages = [say(f"<think>{'t' * (window // 2 - 160)}</think>Paris")]
    first = ask(live, messages, max_tokens=None)
    assert first["choices"][0]["message"]["content"].endswith("</think>Paris")
    total = first["chain"]["total_tokens"]
    again = [*messages, {"role": "assistant", "content": "Paris"}, say("m" * 60)]
    for max_tokens, fits in ((70, True), (window // 4, False)):
        second = ask(live, again, max_tokens=max_tokens)
        assert second["choices"][0]["message"]["content"] == "m" * 60
        assert (second["chain"]["reused_tokens"] == total - 1) == fits
        assert (second["usage"]["prompt_tokens"] > total) == fits
