"""A tokenizer for tests: one token per byte, and the ids of `sparsejax.mock`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsejax.errors import RequestError
from sparsejax.mock import BOS, EOS, VOCAB_SIZE

NAMES = {BOS: "<bos>", EOS: "<eos>"}


class ByteTokenizer:
    vocab_size = VOCAB_SIZE
    eos_ids = (EOS,)
    special_ids = frozenset(NAMES)
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
