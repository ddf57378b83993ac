"""The committed numbers of transformers belong to the windows that the benchmark scores today."""

from __future__ import annotations

import json

from benchmarks import common, perplexity


def test_golden_perplexity_is_for_these_windows(default_model):
    from sparsejax.models.load.gguf_reader import read_gguf
    from sparsejax.models.load.gguf_tokenizer import gguf_tokenizer

    golden = json.loads(perplexity.GOLDEN.read_text("utf-8"))
    tokenizer = gguf_tokenizer(read_gguf(default_model).metadata, None)
    windows = common.windows(tokenizer.encode(common.prose()), golden["windows"], golden["window_tokens"])
    assert golden["token_ids_sha256"] == perplexity.fingerprint(windows)
    assert len({tuple(window) for window in windows}) == golden["windows"]
    assert sum(map(len, windows)) >= 20_000
