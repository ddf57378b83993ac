"""What sparse methods cost in quality: perplexity, divergence from dense attention, and facts found in long contexts.

    python -m benchmarks.quality --json            # the whole sweep; writes tables and pictures beside the JSON file
    python -m benchmarks.quality --quick           # random weights, seconds: does it run?
    python -m benchmarks.quality --families snapkv snapkv+quest+fp8_kv --budgets 512      # budgets become knobs
    python -m benchmarks.quality --methods dense fp8_kv 'snapkv(decode_keep_tokens=960)' --contexts 3500:4
    python -m benchmarks.quality --tasks FOLDER    # multiple choice from JSONL files instead (see docs/quality.md)

Contexts are conversations around public-domain prose (`benchmarks.quality.tasks`). Each is prefilled once; methods
evict from and decode on forks of it (`benchmarks.quality.sweep`). Methods that are wrong on purpose run along and must
come out worst. docs/quality.md says how to read the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common, lines, perplexity

QUICK_MODEL = "tiny-qwen3"


def length_and_count(text: str) -> tuple[int, int]:
    """ "7000:8" -> (7000, 8)."""
    length, colon, count = text.partition(":")
    if not colon or not length.isdecimal() or not count.isdecimal() or not int(length) or not int(count):
        raise argparse.ArgumentTypeError(f"write TOKENS:COUNT, not {text!r}")
    return int(length), int(count)


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser("quality", __doc__.splitlines()[0])
    parser.add_argument("--model", help="as for sparsejax")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="float32", help="of weights and cache; a reference deserves float32")
    parser.add_argument(
        "--contexts",
        type=length_and_count,
        nargs="+",
        default=[(7000, 3)],
        metavar="TOKENS:COUNT",
        help="how many contexts of which length",
    )
    parser.add_argument("--continuation", type=int, default=48, help="tokens of prose decoded after each context")
    parser.add_argument("--budgets", type=int, nargs="*", default=[256, 512, 1024, 2048], help="tokens kept or read")
    parser.add_argument("--methods", nargs="+", help="compositions instead of the usual ones; dense is added")
    parser.add_argument(
        "--families",
        nargs="+",
        metavar="NAME",
        help="members, or combinations joined by +, that get each budget; all members of the registry if not given",
    )
    parser.add_argument(
        "--few",
        type=int,
        default=1,
        metavar="COUNT",
        help="contexts of each length for what needs a prefill, a replay or long decoding of its own",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing later than that")
    parser.add_argument("--windows", type=int, default=3, help="timed decode windows of each method; 0 times none")
    parser.add_argument("--no-controls", action="store_true", help="leave out the methods that are wrong on purpose")
    parser.add_argument("--seed", type=int, default=0, help="of the contexts; the n-th context uses seed + n")
    parser.add_argument("--tasks", type=pathlib.Path, metavar="FOLDER", help="tasks from JSONL files instead")
    parser.add_argument("--limit", type=int, help="most items of each of those tasks")
    parser.add_argument("--quick", action="store_true", help="small random model and contexts: a smoke test")
    parsed = parser.parse_args(argv)
    if parsed.quick:
        quick = {"model": QUICK_MODEL, "load_format": "dummy", "contexts": [(1400, 2)], "continuation": 8}
        vars(parsed).update(quick, budgets=[128], few=1, windows=1)
    if parsed.methods and parsed.families:
        parser.error("--methods has budgets of its own; it goes without --families")
    if parsed.few < 1:
        parser.error("--few must be at least 1")
    if parsed.continuation < 2:
        parser.error("--continuation needs at least 2 tokens: the first one is known")
    for path in (path for path in beside(parsed.json) if path.exists() and not parsed.force):
        parser.error(f"{path} exists; --force overwrites it")
    return parsed


def beside(path: pathlib.Path | None) -> list[pathlib.Path]:
    """The files that go with a JSON file."""
    if path is None:
        return []
    names = [f"_{key}_{size}.svg" for key in ("retrieval", "divergence") for size in ("resident", "read")]
    return [path.with_suffix(".md"), *(path.with_name(path.stem + name) for name in names)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    run = common.Run("quality", arguments)
    result, facts = measure(arguments, run)
    record = run.finish(result, **facts)
    write(arguments, result, record["manifest"])
    return 0


def measure(arguments: argparse.Namespace, run: common.Run) -> tuple[dict[str, Any], dict[str, Any]]:
    import tqdm

    from benchmarks.quality import local, report, sweep, variants
    from sparsejax import combine
    from sparsejax.errors import MethodError
    from sparsejax.models.load import load_model

    chosen = choose(arguments)  # before anything slow
    common.use_compilation_cache()
    model = load_model(arguments.model, load_format=arguments.load_format, dtype=arguments.dtype)
    if arguments.quick:
        model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, max_model_len=4096))
    chosen = [dataclasses.replace(v, method=combine.bound(v.method, encoder(model))) for v in chosen]
    facts = {**common.device_facts(), "model": model.name, "dtype": model.spec.dtype}
    if arguments.tasks:
        try:
            items = local.read_folder(arguments.tasks, model.tokenizer.encode, arguments.limit)
        except ValueError as error:
            raise SystemExit(f"--tasks: {error}") from error
        longest = max(len(item.context) for found in items.values() for item in found)
        steps = sum(map(len, items.values())) * len(chosen)
    else:
        contexts = make_contexts(arguments, model)
        longest = max(len(context.ids) for context in contexts)
    geometry_of = functools.partial(model.spec.geometry, max_model_len=model.spec.max_model_len)
    if not (arguments.methods or arguments.families):
        # What nobody asked for by name may not suit this model.
        facts["left_out"] = {v.spec: why for v in chosen if (why := variants.refusals(v, geometry_of))}
        chosen = [variant for variant in chosen if variant.spec not in facts["left_out"]]
        for spec, why in facts["left_out"].items():
            print(f"left out: {spec}: {'; '.join(why)}")
    try:
        groups = variants.pools(chosen, geometry_of, longest)
    except MethodError as error:
        raise SystemExit(str(error)) from error
    for pool in groups:
        names = ", ".join(variant.label for variant in pool.variants)
        print(f"one prefill for {names}" + (f": {pool.why_alone}" if pool.why_alone else ""))
    if not arguments.tasks:
        steps = sweep.num_steps(groups, contexts, arguments.few)
    seconds: dict[str, float] = {}
    with tqdm.tqdm(total=steps, unit="part", dynamic_ncols=True) as bar:
        last = time.perf_counter()

        def progress(text: str) -> None:
            nonlocal last
            now = time.perf_counter()
            seconds[text] = seconds.get(text, 0.0) + now - last
            last = now
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        facts["seconds"] = seconds  # compilation included
        if arguments.tasks:
            return {"local_tasks": local.run(model, groups, items, progress)}, facts

        def keep(outcomes: list[sweep.Outcome]) -> None:
            if len(outcomes[0].by_context) == len(contexts):
                done = [outcome for outcome in outcomes if outcome.by_context or outcome.invalid]
                run.keep({"lengths": report.summarise(done, contexts)}, **facts)

        minutes = arguments.minutes * 60
        outcomes = sweep.run(model, groups, contexts, progress, arguments.few, arguments.windows, minutes, keep)
    facts |= {"seeds": [arguments.seed + number for number in range(len(contexts))], "batch": sweep.BATCH}
    facts["token_ids_sha256"] = perplexity.fingerprint([list(context.ids) for context in contexts])
    return {"lengths": report.summarise(outcomes, contexts)}, facts


def choose(arguments: argparse.Namespace) -> list[Any]:
    """Dense, the compositions, and unless told otherwise the controls; labels are unique."""
    from benchmarks.quality import variants
    from sparsejax.errors import MethodError

    try:
        if arguments.methods:
            specs = dict.fromkeys((variants.REFERENCE, *arguments.methods))
            chosen = [variants.parse(spec) for spec in specs]
        else:
            names = arguments.families or variants.families()
            chosen = [variants.parse(variants.REFERENCE), *variants.usual(arguments.budgets, names)]
    except MethodError as error:
        raise SystemExit(str(error)) from error
    chosen = variants.told_apart(chosen)
    if not arguments.no_controls and not arguments.tasks:
        budgets = {v.budget for v in chosen if v.budget is not None and v.method.evicts}
        chosen[1:1] = variants.controls(sorted(budgets))  # early: without them the rest says nothing
    return chosen


def encoder(model: Any) -> Callable[[str], list[int]]:
    """Text to ids, without special tokens."""
    return functools.partial(model.tokenizer.encode, add_special_tokens=False)


def make_contexts(arguments: argparse.Namespace, model: Any) -> list[Any]:
    from benchmarks.quality import tasks

    encode = encoder(model)
    start = model.tokenizer.encode("")
    prose = common.prose()
    pieces = tasks.paragraphs(prose)
    room = model.spec.max_model_len - arguments.continuation
    try:
        vocabulary = tasks.Vocabulary.of(encode, prose)
        lengths = [length for length, count in sorted(arguments.contexts) for _ in range(count)]
        contexts = [
            tasks.make_context(encode, pieces, vocabulary, length, arguments.continuation, arguments.seed + i, start)
            for i, length in enumerate(lengths)
        ]
    except ValueError as error:
        raise SystemExit(f"--contexts: {error}") from error
    longest = max(len(context.ids) + max(len(q.ids) for q in context.questions) for context in contexts)
    if longest >= room:
        raise SystemExit(f"--contexts: with questions and continuation they need more than {model.spec.max_model_len}")
    return contexts


def write(arguments: argparse.Namespace, result: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Prints the page, and writes it and the pictures beside the JSON file."""
    from benchmarks.quality import local, report

    path = arguments.json
    if "local_tasks" in result:
        text = local.markdown(result["local_tasks"])
        drawn = {}
    else:
        drawn = report.pictures(result, (path or pathlib.Path("quality.json")).with_suffix(""))
        text = report.markdown(result, manifest, list(drawn) if path else [])
    print(text)
    if path is not None:
        for picture, shown in drawn.items():
            lines.write(picture, shown)
        lines.write(path.with_suffix(".md"), text)


if __name__ == "__main__":
    sys.exit(main())
