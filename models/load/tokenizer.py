"""Text to token ids and back, and chat messages to prompts.

Wraps a fast transformers tokenizer; torch is not needed. Control tokens (every added token of the tokenizer, such as
<|im_end|>) come only from `encode` of a raw prompt and from the chat template: text inside a chat message never becomes
one (see `chat_prompt`).
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsejax.errors import LoadError
from sparsejax.models.load.chat_prompt import ChatPrompt


class Tokenizer:
    """A model's tokenizer. All methods may be called from several threads.

    Args:
      hf: a fast transformers tokenizer (`PreTrainedTokenizerFast`).
      eos_ids: ids that end a text, besides the tokenizer's own end-of-sequence token.
      chat_template: a Jinja template that replaces the checkpoint's.
    """

    def __init__(self, hf: Any, eos_ids: Iterable[int] = (), chat_template: str | None = None) -> None:
        self.hf = hf
        self._backend = hf.backend_tokenizer
        if chat_template is not None:
            hf.chat_template = chat_template
        own_eos = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own_eos, *eos_ids]))
        added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    @property
    def bos_id(self) -> int | None:
        return self.hf.bos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt. Control tokens written in it count as such.

        With `add_special_tokens` the tokenizer's own prefix (a beginning-of-sequence token, where the model wants one)
        is added, once: not if the text already starts with it.
        """
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.hf.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(self.hf.bos_token):
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary become nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation through the chat template.

        Args:
          messages: {"role": ..., "content": str or [{"type": "text", "text": ...}, ...], ...} mappings.
          add_generation_prompt: end with the opening of an assistant turn.
          template_kwargs: variables for the template, e.g. tools=[...], enable_thinking=False.

        Raises:
          RequestError: with param "messages" if they are malformed or the template refuses them.
        """
        return self._chat_prompt.ids(messages, add_generation_prompt, template_kwargs)

    def render_chat_text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The text that `render_chat` encodes."""
        return self._chat_prompt.text(messages, add_generation_prompt, template_kwargs)

    def render_chat_sealed(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        after: int | None = None,
        before: int | None = None,
        **template_kwargs: Any,
    ) -> tuple[str, int | None]:
        """Like `render_chat`, the text before it is encoded: control tokens in it are stand-ins no request can contain.

        Also where the content of message `after` ends or that of `before` begins in it, or None if that can't be said.
        """
        return self._chat_prompt.sealed(messages, add_generation_prompt, template_kwargs, after, before)

    def render_chat_contents(
        self,
        messages: Sequence[Mapping[str, Any]],
        indexes: Sequence[int],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """The text of `render_chat_sealed`, and where in it the contents of the messages `indexes` begin and end.

        Messages for which that can't be said, or not in this way, are left out.
        """
        return self._chat_prompt.contents(messages, add_generation_prompt, template_kwargs, indexes)

    def seal(self, text: str, add_special_tokens: bool = True) -> str | None:
        """The sealed text of a raw prompt: `encode_sealed` of it gives the ids of `encode`.

        None where the tokenizer adds anything but a beginning-of-sequence token.
        """
        added = self.encode("", add_special_tokens)
        if not added:
            return self._chat_prompt.seal(text)
        bos = self.hf.bos_token
        if added != [self.bos_id] or bos is None:
            return None
        return self._chat_prompt.seal(text if text.startswith(bos) else bos + text)

    def encode_sealed(self, text: str) -> list[int]:
        """Token ids of sealed text."""
        return self._chat_prompt.encode(text)

    def sealed_bytes(self, token_id: int) -> bytes:
        """What one token stands for in sealed text, as UTF-8; like `token_bytes` for all but control tokens."""
        raw = self.token_bytes(token_id)
        return self._chat_prompt.stand_in(raw.decode()).encode() if token_id in self._added_ids else raw

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return self._control_ids

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.content in self._chat_prompt.control_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token, special tokens spelled out; an incomplete UTF-8 sequence shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that one token stands for (it may be part of a character); b"" beyond the vocabulary."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added_ids:
            return piece.encode()
        if self._is_byte_level:
            table = _bytes_of_byte_level()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the tokenizer's files and the ids that end a text, for `load_tokenizer`."""
        folder = pathlib.Path(folder)
        self.hf.save_pretrained(str(folder))
        path = folder / "generation_config.json"
        if not path.exists():
            path.write_text(json.dumps({"eos_token_id": list(self.eos_ids)}))

    @functools.cached_property
    def _chat_prompt(self) -> ChatPrompt:
        return ChatPrompt(self.hf)

    @functools.cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


def load_tokenizer(
    source: str | pathlib.Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    chat_template: str | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """A tokenizer from a folder with Hugging Face tokenizer files, or from a hub id."""
    transformers = import_transformers()
    try:
        hf = transformers.AutoTokenizer.from_pretrained(
            str(source), revision=revision or "main", local_files_only=offline, trust_remote_code=False
        )
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise LoadError(
            f"no tokenizer can be loaded from {source}: {reason}. It needs tokenizer.json (or the files it is made"
            " from); name another folder or hub id with --tokenizer."
        ) from error
    if not getattr(hf, "is_fast", False):
        raise LoadError(f"{source} has only a slow tokenizer; sparsejax needs a fast one (tokenizer.json)")
    return Tokenizer(hf, eos_ids_of(generation_config or {}), chat_template)


def import_transformers() -> Any:
    """The transformers module, without its advice at import to install torch: only tokenizers are used."""
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())
    import transformers

    return transformers


def eos_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of a config or generation config, which may be one id, a list or absent."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, (list, tuple)) else (int(value),)


def read_chat_template(value: str) -> str:
    """A chat template given as text or as the path of a file."""
    if "{" in value or "\n" in value:
        return value
    path = pathlib.Path(value)
    if not path.is_file():
        raise LoadError(f"--chat-template: {value} is neither a file nor a Jinja template")
    return path.read_text(encoding="utf-8")


@functools.cache
def _bytes_of_byte_level() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 is itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def byte_level_alphabet() -> list[str]:
    """The stand-in of each byte, in byte order."""
    table = _bytes_of_byte_level()
    return sorted(table, key=table.__getitem__)
