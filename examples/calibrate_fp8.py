"""Writes a scale file for the static modes of fp8_kv: the largest key and value of each layer over some text, / 448.

python examples/calibrate_fp8.py TEXT_FILE SCALES.json [MODEL]
python -m sparsejax.serve [MODEL] --sparse-method "fp8_kv(fp8_kv_scale_mode=static,fp8_kv_scale_path=SCALES.json)"
"""

import json
import pathlib
import sys

import numpy as np

from sparsejax import registry, steps
from sparsejax.capacity import checkpoint_id, model_hash
from sparsejax.models.load import load_model
from sparsejax.state import StateSize, empty_state
from sparsejax.storages.fp8_kv import LARGEST, scale_file

CHUNK, CHUNKS, ROW, PAGE_SIZE = 512, 8, 1, 16

text, target = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"), pathlib.Path(sys.argv[2])
name = sys.argv[3] if len(sys.argv) > 3 else None
model = load_model(name)
method, storage = registry.resolve("dense")
geometry = model.spec.geometry(PAGE_SIZE, CHUNK)
statics = steps.Statics(model.spec, geometry, method, storage)
num_pages = 1 + geometry.max_pages
state = empty_state(geometry, StateSize(1, num_pages, model.spec.vocab_size), (method,), storage)
updates = steps.table_updates(ROW, np.arange(1, num_pages, dtype=np.int32)[None, None])
ints, floats = steps.greedy_inputs(1)

ids = model.tokenizer.encode(text)
shape = (num_pages, geometry.num_layers, geometry.num_kv_heads, -1)
largest = {name: np.zeros((geometry.num_layers, geometry.num_kv_heads), np.float32) for name in ("k", "v")}
for start in range(0, min(len(ids), CHUNK * CHUNKS), CHUNK):
    part = ids[start : start + CHUNK]
    tokens = np.zeros((1, CHUNK), np.int32)
    tokens[0, : len(part)] = part
    row = np.array([[ROW, len(part), True, False]], np.int32)
    state, _ = steps.prefill_chunk(
        statics, model.weights, state, steps.PrefillInputs(tokens, row, ints, floats, updates)
    )
    full = len(part) // PAGE_SIZE  # rows past the text belong to the chunk before
    for pool, seen in largest.items():
        rows = np.abs(np.asarray(state.pools[pool], np.float32)).reshape(shape)[1 : 1 + full]
        largest[pool] = np.maximum(seen, rows.max((0, 3), initial=0.0))

scales = [((k / LARGEST).tolist(), (v / LARGEST).tolist()) for k, v in zip(largest["k"], largest["v"], strict=True)]
record = scale_file(scales, "static", checkpoint_id(name), model_hash(model.spec))
target.write_text(json.dumps(record, indent=1), encoding="utf-8")
print(f"{target}: {geometry.num_layers} layers, scales from {min(len(ids), CHUNK * CHUNKS)} tokens")
