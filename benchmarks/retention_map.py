"""Which rows survive: a picture per method of one conversation, its positions across and the layers down.

    python -m benchmarks.retention_map --json --plot docs/images
    python -m benchmarks.retention_map --methods 'snapkv(head_mode=per_kv_head)' --rows 512 --plot FOLDER
    python -m benchmarks.retention_map --methods NAME --as-given     # with the knobs that are written, no budget

The conversation has several turns of public-domain prose and a tool's result. All of it but the last answer is the
prompt; the answer is decoded token by token with its text forced, so that methods which act while decoding act too.
Afterwards the positions of the rows that each layer and KV head still holds are read from the cache.

Pictures are `retention_NAME.svg`. The result file has rows by layer, shares by turn, and how alike layers choose.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common, raster

QUICK = {"model": "tiny-qwen3", "load_format": "dummy", "tokens": 640, "answer": 48, "rows": 128, "chunk": 128}


@dataclasses.dataclass(frozen=True)
class Turn:
    """Tokens of one turn, the name of its speaker included."""

    speaker: str
    ids: tuple[int, ...]


def conversation(encode: Callable[[str], list[int]], tokens: int, answer: int, start: Sequence[int] = ()) -> list[Turn]:
    """Turns of exactly `tokens` tokens in all, the last one, an answer, of `answer` tokens.

    Args:
      encode: text to ids, without special tokens.
      tokens, answer: lengths.
      start: ids that every text of the model starts with; they count to the first turn.

    Raises:
      ValueError: there is no room for the turns.
    """
    novel, treatise = (common.prose_of(name) for name in common.TEXTS)
    result = '{"status": "ok", "title": "Opticks", "edition": 4, "pages": ['
    # (speaker, what it says, prose that fills the turn, its share of the tokens that are left)
    script = (
        ("User", "I have begun this novel. Here is its first chapter.\n\n", novel, 4),
        ("Assistant", "Thank you. What I remember of it: ", novel[20000:], 1),
        ("User", "Now look up what the treatise on light says at its end.", "", 0),
        ("Tool", result, treatise, 5),
        ("Assistant", "The treatise closes like this. ", treatise[20000:], 1),
        ("User", "And here is more of the novel. Go on where it ends.\n\n", novel[8000:], 4),
    )
    heads = [encode(f"{speaker}: {text}") for speaker, text, _, _ in script]
    heads[0] = [*start, *heads[0]]
    ends = [encode("\n\n")] * len(script)
    ends[3] = encode('"]}\n\n')
    room = tokens - answer - sum(map(len, heads)) - sum(map(len, ends))
    shares = [share for *_, share in script]
    if room < sum(shares) or answer < 8:
        raise ValueError(f"{tokens} tokens with an answer of {answer} leave no room for a conversation")
    counts = [room * share // sum(shares) for share in shares]
    counts[-1] += room - sum(counts)
    turns = []
    for (speaker, _, prose, _), head, count, end in zip(script, heads, counts, ends, strict=True):
        turns.append(Turn(speaker, (*head, *_fill(encode(prose), count), *end)))
    told = _fill(encode(novel[8000:]), counts[-1] + answer)[counts[-1] :]
    opening = encode("Assistant: ")
    turns.append(Turn("Assistant", (*opening, *told)[:answer]))
    return turns


def _fill(ids: Sequence[int], count: int) -> list[int]:
    if not count:
        return []
    return [ids[i % len(ids)] for i in range(count)]


def evicting() -> list[str]:
    """Every single method that drops rows."""
    from sparsejax import registry

    found = [entry for entry in registry.available().values() if entry.kind == "method" and entry.sized]
    return [entry.name for entry in found if entry.build(entry.params_type()).evicts]


@dataclasses.dataclass(frozen=True)
class Map:
    """What is left of a conversation.

    Attributes:
      composition: as a user would write it.
      positions: int32 [layers][heads][held], logical, ascending.
    """

    composition: str
    positions: list[list[Any]]

    @property
    def heads_differ(self) -> bool:
        return any(list(head) != list(layer[0]) for layer in self.positions for head in layer[1:])

    def lines(self) -> list[list[Any]]:
        """The heads to draw, layer by layer: one where all of a layer hold the same rows."""
        return [layer if self.heads_differ else layer[:1] for layer in self.positions]


def survivors(model: Any, composition: str, turns: Sequence[Turn], chunk: int) -> Map:
    """Reads the conversation with a method and returns what it holds at the end."""
    from benchmarks.rows import Rows
    from sparsejax import combine, registry
    from sparsejax.errors import MethodError
    from sparsejax.runner import DeviceRunner

    method, storage = registry.resolve(composition)
    method = combine.bound(method, lambda text: model.tokenizer.encode(text, add_special_tokens=False))
    prompt = [token for turn in turns[:-1] for token in turn.ids]
    answer = turns[-1].ids
    replay = max(method.replay_lengths(len(prompt)), default=0)
    room = len(prompt) + max(len(answer), replay) + 1
    geometry = model.spec.geometry(method.page_size(method.params) or 16, room)
    reasons = method.check(method.params, geometry)
    if reasons:
        raise MethodError(f"{composition}: " + "; ".join(reasons))
    runner = DeviceRunner(
        model.spec,
        model.weights,
        geometry,
        {composition: method},
        storage,
        num_rows=1,
        num_sequence_pages=2 + 2 * geometry.max_pages,
        decode_buckets=(1,),
        prefill_buckets=((1, chunk), *([(1, replay)] if replay else [])),
    )
    rows = Rows(runner, composition, chunk=chunk)
    rows.prefill(1, prompt)
    for token in answer:
        rows.logits([1], [token])
    return Map(composition, rows.positions(1))


def facts(found: Map, turns: Sequence[Turn]) -> dict[str, Any]:
    """Numbers of a map: rows by layer, the share of each turn that is left, and how much two layers agree."""
    import numpy as np

    total = sum(len(turn.ids) for turn in turns)
    kept = np.zeros((len(found.positions), len(found.positions[0]), total), bool)
    for layer, heads in enumerate(found.positions):
        for head, positions in enumerate(heads):
            kept[layer, head, positions] = True
    by_layer = kept.sum(2).mean(1)
    shares, start = [], 0
    for turn in turns:
        shares.append({"speaker": turn.speaker, "kept": float(kept[:, :, start : start + len(turn.ids)].mean())})
        start += len(turn.ids)
    pairs = [(kept[i, 0] & kept[i + 1, 0]).sum() / (kept[i, 0] | kept[i + 1, 0]).sum() for i in range(len(kept) - 1)]
    everywhere = kept.all((0, 1))
    return {
        "composition": found.composition,
        "tokens": total,
        "rows": {"mean": float(by_layer.mean()), "least": float(by_layer.min()), "most": float(by_layer.max())},
        "rows_by_layer": by_layer.tolist(),
        "heads_differ": found.heads_differ,
        "first_kept_everywhere": _leading(everywhere),
        "last_kept_everywhere": _leading(everywhere[::-1]),
        "kept_everywhere": int(everywhere.sum()),
        "kept_nowhere": int((~kept.any((0, 1))).sum()),
        "overlap_of_neighbouring_layers": float(np.mean(pairs)) if pairs else 1.0,
        "turns": shares,
    }


def _leading(flags: Any) -> int:
    """How many are true before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def svg(name: str, found: Map, numbers: dict[str, Any], turns: Sequence[Turn], model: str) -> str:
    """The picture: see `raster.svg`."""
    import numpy as np

    total, lines = numbers["tokens"], found.lines()
    kept = np.zeros((sum(map(len, lines)), total), np.float32)
    for line, positions in enumerate(positions for heads in lines for positions in heads):
        kept[line, positions] = 1.0
    ends = np.cumsum([len(turn.ids) for turn in turns]).tolist()
    borders = [
        (start, end, "answer (decoded)" if i == len(turns) - 1 else turn.speaker.lower())
        for i, (start, end, turn) in enumerate(zip([0, *ends[:-1]], ends, turns, strict=True))
    ]
    first, last = numbers["first_kept_everywhere"], numbers["last_kept_everywhere"]
    spans = [(0, first, f"first {first} in every layer")] if first > 1 else []
    if last > 1 and last < total:
        spans.append((total - last, total, f"last {last} in every layer"))
    rows = numbers["rows"]
    held = f"{rows['mean']:,.0f} of {total:,} rows"
    if rows["least"] != rows["most"]:
        held += f" on average, {rows['least']:,.0f} to {rows['most']:,.0f} by layer"
    return raster.svg(
        f"{name}: {held}",
        f"{model}; {found.composition}",
        kept,
        lines_per_row=len(lines[0]),
        borders=borders,
        spans=spans,
        bars=numbers["rows_by_layer"],
        x_label="position of the token in the conversation",
        y_label="layer, and KV heads within it" if found.heads_differ else "layer",
        bar_label="rows held",
    )


def file_name(composition: str) -> str:
    """ "a(x=1)+b" -> "a_b": the members; what their knobs are stands in the picture."""
    return "_".join(re.findall(r"(?:^|\+)\s*([\w-]+)", re.sub(r"\([^()]*\)", "", composition)))


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser("retention_map", __doc__.splitlines()[0])
    parser.add_argument("--model", help="as for sparsejax")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="float32", help="of weights and cache")
    parser.add_argument("--methods", nargs="+", help="compositions; every method that evicts if not given")
    parser.add_argument("--rows", type=int, default=512, help="rows that each of them is given, in tokens")
    parser.add_argument("--as-given", action="store_true", help="take --methods with their own knobs, whatever --rows")
    parser.add_argument("--tokens", type=int, default=4096, help="of the conversation")
    parser.add_argument("--answer", type=int, default=160, help="of its last answer, which is decoded")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt chunk")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FOLDER", help="draw the pictures into it")
    parser.add_argument("--quick", action="store_true", help="small random model and text: a smoke test")
    parsed = parser.parse_args(argv)
    if parsed.quick:
        vars(parsed).update(QUICK)
    if parsed.as_given and not parsed.methods:
        parser.error("--as-given needs --methods")
    if parsed.plot is not None and not parsed.plot.is_dir():
        parser.error(f"--plot: {parsed.plot} is not a folder")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    run = common.Run("retention_map", arguments)
    result, more = measure(arguments)
    run.finish(result, **more)
    return 0


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    import tqdm

    from benchmarks import lines
    from sparsejax import registry
    from sparsejax.errors import MethodError
    from sparsejax.models.load import load_model

    names = arguments.methods or evicting()
    try:
        chosen = names if arguments.as_given else [registry.sized(name, arguments.rows) for name in names]
        for composition in chosen:
            registry.resolve(composition)
    except MethodError as error:
        raise SystemExit(str(error)) from error
    common.use_compilation_cache()
    model = load_model(arguments.model, load_format=arguments.load_format, dtype=arguments.dtype)

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=False)

    try:
        turns = conversation(encode, arguments.tokens, arguments.answer, model.tokenizer.encode(""))
    except ValueError as error:
        raise SystemExit(f"--tokens: {error}") from error
    result = {}
    with tqdm.tqdm(chosen, unit="method", dynamic_ncols=True) as bar:
        for composition in bar:
            name = file_name(composition)
            bar.set_postfix_str(name, refresh=True)
            try:
                found = survivors(model, composition, turns, arguments.chunk)
            except MethodError as error:
                raise SystemExit(str(error)) from error
            result[name] = facts(found, turns)
            if arguments.plot is not None:
                path = arguments.plot / f"retention_{name}.svg"
                lines.write(path, svg(name, found, result[name], turns, model.name))
    header = ("method", "rows", "least", "most", "overlap", *(turn.speaker.lower() for turn in turns))
    print(common.table(header, [_line(name, numbers) for name, numbers in result.items()]))
    return result, {
        **common.device_facts(),
        "model": model.name,
        "dtype": model.spec.dtype,
        "turns": [{"speaker": turn.speaker, "tokens": len(turn.ids)} for turn in turns],
    }


def _line(name: str, numbers: dict[str, Any]) -> list[str]:
    rows = [f"{numbers['rows'][key]:,.0f}" for key in ("mean", "least", "most")]
    overlap = f"{numbers['overlap_of_neighbouring_layers']:.0%}"
    return [name, *rows, overlap, *(f"{turn['kept']:.0%}" for turn in numbers["turns"])]


if __name__ == "__main__":
    sys.exit(main())
