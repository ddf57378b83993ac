"""Writes the worked examples of history that a few layers choose for the others: see `make_vectors`.

python -m tests.vectors.make_omnikv_prefill_vectors [folder]
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from tests.vectors.make_vectors import HERE, best, cases_text, gap

SINK, RECENT, KEEP = 1, 2, 3


def chunk_case(rng: np.random.Generator, name: str, rows: int, chunk: int) -> dict:
    """The last `chunk` of so many rows are new."""
    q, k = (rng.integers(-6, 7, size=shape) / 4.0 for shape in ((4, chunk, 4), (2, rows, 4)))
    logits = np.einsum("hcd,hsd->hcs", q, np.repeat(k, 2, axis=0))
    seen = np.arange(rows) <= np.arange(rows - chunk, rows)[:, None]
    scores = np.where(seen, logits, 0.0).mean(1).max(0)
    tail = max(rows - chunk - RECENT, SINK)
    history = scores[SINK:tail]
    chosen = [i + SINK for i in best(history, KEEP)]
    return {
        "name": name,
        "params": {
            "omnikv_prefill_sink_keep_tokens": SINK,
            "omnikv_prefill_recent_keep_tokens": RECENT,
            "omnikv_prefill_keep_tokens": KEEP,
        },
        "inputs": {"q_chunk": q, "k": k, "chunk": chunk},
        "expected": {
            "score": scores,
            "tail_start": tail,
            "visible_rows": [*range(SINK), *chosen, *range(tail, rows)],
            "gap": gap(history, min(KEEP, len(history))),
        },
    }


def omnikv_prefill() -> str:
    rng = np.random.default_rng(13)
    cases = [
        chunk_case(rng, "pruned", 12, 3),
        chunk_case(rng, "history_fits", 8, 3),
        chunk_case(rng, "first_chunk", 5, 5),
    ]
    anchors, layers = [0, 1, 4], 7
    ends = [*anchors[1:], layers]
    targets = {str(a): list(range(a + 1, end)) for a, end in zip(anchors, ends, strict=True) if a + 1 < end}
    cases.append(
        {
            "name": "anchor_map",
            "params": {"omnikv_prefill_full_attention_layers": anchors},
            "inputs": {"num_layers": layers},
            "expected": {"targets": targets, "scoring_layers": [int(anchor) for anchor in targets]},
        }
    )
    description = "History rows visible to non-anchor layers for one chunk, and the anchor-to-target map."
    return cases_text("omnikv_prefill", description, cases)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    (folder / "omnikv_prefill.json").write_text(omnikv_prefill(), encoding="utf-8")
