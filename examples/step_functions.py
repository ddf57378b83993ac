"""The step functions without a server: prefill a prompt, evict most of it with SnapKV, decode.

python examples/step_functions.py           the default model (fetched once, about 145 MB)
python examples/step_functions.py --random  tiny random weights: nothing to fetch, nothing to understand
"""

import sys

import numpy as np

from sparsejax import registry, steps
from sparsejax.models.load import load_model
from sparsejax.state import StateSize, empty_state

PROMPT = "The capital of France is Paris. The capital of Italy is Rome. " * 12 + "The capital of Spain is"
ROW, NEW_TOKENS, PAGE_SIZE = 1, 12, 16  # row 0 and page 0 are the null ones, which padding uses

model = load_model("tiny-llama", load_format="dummy") if "--random" in sys.argv else load_model(progress=True)
knobs = {"sink_keep_tokens": 4, "decode_keep_tokens": 44, "recent_keep_tokens": 16, "observation_window_size": 16}
method, storage = registry.resolve("snapkv", knobs)
prompt = model.tokenizer.encode(PROMPT)[:480]

geometry = model.spec.geometry(PAGE_SIZE, max_model_len=512)
statics = steps.Statics(model.spec, geometry, method, storage)
size = StateSize(num_rows=1, num_sequence_pages=64, vocab_size=model.spec.vocab_size)
state = empty_state(geometry, size, (method,), storage)

# The host owns the pages: one of these covers 16 tokens in all layers and heads. Give the prompt as many as it needs.
free = list(range(1, 64))
pages = np.array([[[free.pop() for _ in range(geometry.pages(len(prompt)))]]])
ints, floats = steps.greedy_inputs(1)
row = np.array([[ROW, len(prompt), True, True]], np.int32)  # row, tokens, first chunk, sample from the last token
inputs = steps.PrefillInputs(np.array([prompt], np.int32), row, ints, floats, steps.table_updates(ROW, pages))
state, out = steps.prefill_chunk(statics, model.weights, state, inputs)
tokens = [int(out.packed[0, 0])]

# Both sides know from integers alone how many rows stay; which ones is the device's business.
kept = int(method.kept_after("prompt", np.array([len(prompt)]))[0])
new_pages = np.array([[[free.pop() for _ in range(geometry.pages(kept + NEW_TOKENS))]]], np.int32)
plan = steps.MaintainInputs(np.int32(ROW), np.full((1, 1), kept, np.int32), new_pages, np.int32(len(prompt)))
state = steps.maintain_step(statics, state, plan, phase="prompt", kept=kept)
print(f"{len(prompt)} prompt tokens, {kept} rows stay; {pages.size} pages come back, {new_pages.size} are in use")

nothing = steps.table_updates(ROW, pages[:, :, :0], width=1)
decode = steps.DecodeInputs(np.array([[ROW, -1]], np.int32), ints, floats, nothing)  # -1: append what was sampled
for _ in range(NEW_TOKENS - 1):
    state, out = steps.decode_step(statics, model.weights, state, decode)
    tokens.append(int(out.packed[0, 0]))
print(PROMPT[-24:] + model.tokenizer.decode(tokens))
