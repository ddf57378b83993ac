"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from sparsejax.detokenize import TextPiece
from sparsejax.serving.state import Tokenizer

# JSON has no -inf; OpenAI's own floor for tokens of no probability.
_FLOOR = -9999.0


def chat_logprobs(tokenizer: Tokenizer, piece: TextPiece) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one entry per token; the bytes of all entries joined are the text's.

    Tokens without text (skipped special tokens) have null bytes.
    """
    content = []
    for logprob, visible in zip(piece.logprobs, piece.visible, strict=True):
        entry = _entry(tokenizer, logprob.token, logprob.logprob, visible)
        entry["top_logprobs"] = [_entry(tokenizer, token, value, True) for token, value in logprob.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float, visible: bool) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {
        "token": tokenizer.token_text(token),
        "logprob": max(logprob, _FLOOR),
        "bytes": list(raw) if visible else None,
    }


def completion_logprobs(tokenizer: Tokenizer, piece: TextPiece) -> dict[str, Any]:
    """`choices[].logprobs` of completions."""
    top: list[dict[str, float]] = []
    for logprob in piece.logprobs:
        best: dict[str, float] = {}
        for token, value in logprob.top:
            # Different tokens may have the same text: the more likely one, which comes first, stays.
            best.setdefault(token_label(tokenizer, token), max(value, _FLOOR))
        # The sampled token is always there, also when it is not among the best.
        if logprob.top:
            best.setdefault(token_label(tokenizer, logprob.token), max(logprob.logprob, _FLOOR))
        top.append(best)
    return {
        "tokens": [token_label(tokenizer, logprob.token) for logprob in piece.logprobs],
        "token_logprobs": [max(logprob.logprob, _FLOOR) for logprob in piece.logprobs],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(piece.offsets),
    }


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or its bytes as OpenAI writes them where it is only part of a character."""
    raw = tokenizer.token_bytes(token)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return tokenizer.token_text(token)
