"""Tokenizers from GGUF metadata.

A GGUF file names its pre-tokenizer but does not describe it. Those known here are built exactly as the originals'
tokenizer.json; any other name is refused, since a near miss would change token ids without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sparsejax.errors import LoadError
from sparsejax.models.load.tokenizer import Tokenizer, import_transformers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type

# Contractions, words, numbers, punctuation, line ends, white space; llama3 takes up to three digits at a time.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT, _QWEN2_SPLIT = _SPLIT % "{1,3}", _SPLIT % ""


@dataclasses.dataclass(frozen=True)
class _ByteLevel:
    """How a byte-level BPE cuts text: `split` regex (None: GPT-2's own), single digits, NFC, whole words first."""

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_BYTE_LEVEL = {
    "gpt-2": _ByteLevel(),
    "smollm": _ByteLevel(single_digits=True),
    "llama-bpe": _ByteLevel(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True),
    "qwen2": _ByteLevel(split=_QWEN2_SPLIT, nfc=True),
    "deepseek-r1-qwen": _ByteLevel(split=_QWEN2_SPLIT),
}


def gguf_tokenizer(metadata: Mapping[str, Any], chat_template: str | None = None) -> Tokenizer:
    """The tokenizer that a file's metadata describe. Raises LoadError if it can't be rebuilt exactly."""
    transformers = import_transformers()

    kind = metadata.get("tokenizer.ggml.model")
    builder = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if builder is None:
        raise LoadError(
            f"the GGUF file has a tokenizer of kind {kind!r}, which can't be rebuilt (known: gpt2, llama);"
            " name a folder or hub id that has tokenizer.json with --tokenizer"
        )
    try:
        backend, add_bos = builder(metadata)
    except LoadError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for merges outside the vocabulary
        raise LoadError(
            f"the GGUF file's tokenizer is damaged ({type(error).__name__}: {error}); set --tokenizer"
        ) from None
    tokens = metadata["tokenizer.ggml.tokens"]

    def named(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[int(index)] if index is not None and 0 <= int(index) < len(tokens) else None

    bos = named("bos")
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos) and bos is not None:
        _prefix_with_bos(backend, bos)
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = metadata.get("tokenizer.chat_template")
    # End of turn and end of message end a text too, where the file tells them apart from end of sequence.
    extra = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    return Tokenizer(hf, [int(index) for index in extra if index is not None], chat_template)


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Any, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    cut = _BYTE_LEVEL.get(str(name))
    if cut is None:
        raise LoadError(
            f"the GGUF file's pre-tokenizer {name!r} is unknown (known: {', '.join(_BYTE_LEVEL)});"
            " name a folder or hub id that has tokenizer.json with --tokenizer"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.split is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_control_tokens(backend, metadata)
    return backend, cut.add_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Any, bool]:
    """Llama 2's tokenizer: BPE over pieces with U+2581 for a space, unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    backend = Tokenizer(
        models.BPE(
            vocabulary, _merges_from_scores(metadata), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace] if prefix else [replace])
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add_control_tokens(backend, metadata)
    return backend, True


def _merges_from_scores(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score of the whole first: the order sentencepiece merges in."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    usable = {token: index for index, token in enumerate(tokens) if kinds[index] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    ranked = []
    for token, index in usable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-float(scores[index]), usable[left], usable[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_control_tokens(backend: Any, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        raise LoadError("the GGUF file lists no token types, so its control tokens are unknown; set --tokenizer")
    tokens = metadata["tokenizer.ggml.tokens"]
    for index, kind in enumerate(kinds):
        if kind in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(tokens[index], special=False, normalized=False)])


def _prefix_with_bos(backend: Any, bos: str) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, backend.token_to_id(bos))]
    )
