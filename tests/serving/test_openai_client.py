"""The real `openai` client, synchronous and asynchronous, and many clients at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from sparsejax.config import ServerConfig
from sparsejax.mock import MockRunner
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import POISON, say_script


@pytest.fixture(scope="module")
def client(shared: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="mock", messages=[{"role": "user", "content": "say:Grüße 👋"}], temperature=0, seed=1, logprobs=True
    )
    assert answer.choices[0].message.content == "Grüße 👋"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Grüße 👋".encode()) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    assert answer.model_extra is not None
    assert answer.model_extra["sparsejax"]["method"] == "dense"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="mock",
        messages=[{"role": "user", "content": "say:one two three"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "one two three"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(text) + 1


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="mock", messages=[{"role": "user", "content": "say:helper"}], n=2
    ) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["helper", "helper"]


def test_text_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mock", prompt=["say:a", "say:b"], logprobs=2, max_tokens=9)
    assert [choice.text for choice in answer.choices] == ["a", "b"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1]
    stream = client.completions.create(model="mock", prompt="say:streamed", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "streamed"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mock"]
    assert client.models.retrieve("mock").id == "mock"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "x"}], temperature=-1, stream=True
        )
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])


def test_key(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(api_key=("right",)))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as good:
        assert good.models.list().data
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as bad,
        pytest.raises(openai.AuthenticationError),
    ):
        bad.models.list()


def test_error_event_reaches_the_client(servers: Servers) -> None:
    runner = MockRunner(script=say_script, step_s=0.005, verify=False)
    runner.poison(POISON)
    server = servers.start(runner)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "say:abcQ"}], stream=True
        )
        with pytest.raises(openai.APIError, match="internal error"):
            list(stream)


def test_closing_a_stream_cancels(servers: Servers) -> None:
    server = servers.start(MockRunner(script=say_script, step_s=0.005, verify=False))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "on and on"}], stream=True
        )
        next(iter(stream))
        stream.close()
    server.wait_idle(2.0)


def test_async_client(shared: LiveServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(i: int) -> str:
                messages: list = [{"role": "user", "content": f"say:answer {i}"}]
                if i % 2:
                    answer = await client.chat.completions.create(model="mock", messages=messages)
                    return answer.choices[0].message.content or ""
                stream: AsyncIterator = await client.chat.completions.create(
                    model="mock", messages=messages, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(ask(i) for i in range(10))))

    assert asyncio.run(run()) == [f"answer {i}" for i in range(10)]


def test_fifty_clients_at_once(servers: Servers) -> None:
    server = servers.start(MockRunner(script=say_script, verify=True))

    def one(i: int) -> bool:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            wanted = f"client {i}: " + " ".join(str(n) for n in range(i, i + 12))
            stream = client.chat.completions.create(
                model="mock", messages=[{"role": "user", "content": f"say:{wanted}"}], stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted

    with ThreadPoolExecutor(50) as pool:
        assert all(pool.map(one, range(50)))
    server.wait_idle()
    assert server.state.active_requests == 0
