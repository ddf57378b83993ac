"""A tokenizer for tests: one token per byte, and the ids of `sparsejax.mock`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsejax.errors import RequestError
from sparsejax.mock import BOS, EOS, VOCAB_SIZE

NAMES = {BOS: "<bos>", EOS: "<eos>"}
STAND_INS = {BOS: "\ue000", EOS: "\ue001"}


class ByteTokenizer:
    vocab_size = VOCAB_SIZE
    eos_ids = (EOS,)
    special_ids = frozenset(NAMES)
    control_ids = special_ids
    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raw = b""
        for i in ids:
            raw += bytes([i]) if i < 256 else b"" if skip_special_tokens else NAMES[i].encode()
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else NAMES[token].encode()

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        if variables.get("refuse"):
            raise RequestError("the chat template refuses these messages", param="messages")
        ids: list[int] = []
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            ids += [BOS, *f"{message['role']}:{content}\n".encode()]
        if continue_final_message:
            return ids[:-1]
        return [*ids, BOS, *b"assistant:"] if add_generation_prompt else ids

    def seal(self, text: str, add_special_tokens: bool = True) -> str:
        return text

    def encode_sealed(self, text: str) -> list[int]:
        controls = {stand_in: token for token, stand_in in STAND_INS.items()}
        return [i for char in text for i in ([controls[char]] if char in controls else char.encode())]

    def sealed_bytes(self, token_id: int) -> bytes:
        return STAND_INS[token_id].encode() if token_id in STAND_INS else bytes([token_id])

    def render_chat_sealed(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        after: int | None = None,
        before: int | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[str, int | None]:
        def sealed(part: Sequence[Mapping[str, Any]], opening: bool, cut: bool) -> str:
            ids = self.render_chat(part, opening, cut, **variables)
            return b"".join(map(self.sealed_bytes, ids)).decode()

        text = sealed(messages, add_generation_prompt, continue_final_message)
        if before is not None:
            return text, len(sealed(messages[:before], False, False)) + len(f"x{messages[before]['role']}:")
        return text, None if after is None else len(sealed(messages[: after + 1], False, False)) - 1

    def render_chat_contents(
        self,
        messages: Sequence[Mapping[str, Any]],
        indexes: Sequence[int],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        found, text = {}, ""
        for index in indexes:
            text, start = self.render_chat_sealed(messages, add_generation_prompt, before=index, **variables)
            _, stop = self.render_chat_sealed(messages, add_generation_prompt, after=index, **variables)
            found[index] = (start or 0, stop or 0)
        return text, found
