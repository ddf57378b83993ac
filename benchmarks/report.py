"""Collects result files into docs/results.md, a section with the main numbers of each and pictures, and README.md.

python -m benchmarks.report            # writes docs/results.md, docs/images/results_*.svg and README.md's table
python -m benchmarks.report --check    # writes nothing; exit code 1 if one of them is not what the files say
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report_chains, report_sections
from benchmarks.common import RESULTS, ROOT
from benchmarks.report_pictures import PICTURES
from benchmarks.report_sections import Record
from benchmarks.report_summary import MarkersError, filled, summary

SECTIONS = report_sections.SECTIONS | report_chains.SECTIONS
DOCS = ROOT / "docs"
IMAGES = "images"
README = "../README.md"
"""Relative to docs/."""


class MissingKeyError(ValueError):
    """A result file lacks a number that its section shows."""


def kind(stem: str) -> str:
    """Which section a file belongs to: its name without the device."""
    return stem.removesuffix("_h200")


def facts(manifest: Mapping[str, Any]) -> str:
    """One line: when, on what, with what."""
    shown = [manifest["date"][:10], manifest.get("device"), f"{manifest['cpu']} ({manifest['cpu_count']} cores)"]
    shown += [manifest.get("model"), manifest.get("dtype")]
    shown += ["unfinished"] if manifest.get("unfinished") else []
    shown += [f"{package} {version}" for package, version in manifest["versions"].items()]
    return ", ".join([*(part for part in shown if part), f"commit {manifest['git_commit']}"])


def report(records: Mapping[str, Record]) -> dict[str, str]:
    """Texts by path relative to docs/, from the records by file stem.

    Raises:
      MissingKeyError: a record lacks what its section shows; names the file and the key.
    """
    parts = [
        "# Results",
        "Written by `python -m benchmarks.report` from the files in `benchmarks/results/`; do not edit.",
    ]
    parts.append(
        "What the numbers mean: [performance](performance.md), [quality](quality.md), [benchmarks](benchmarks.md)."
    )
    written: dict[str, str] = {}
    order = list(SECTIONS)
    known = sorted((stem for stem in records if kind(stem) in SECTIONS), key=lambda s: (order.index(kind(s)), s))
    for stem in known:
        title, section = SECTIONS[kind(stem)]
        try:
            source = f"[{stem}.json](../benchmarks/results/{stem}.json)"
            manifest = records[stem]["manifest"]
            parts += [f"## {title}", f"{source}: {facts(manifest)}."]
            parts += [f"Note: {manifest['notes']}."] if "notes" in manifest else []
            for picture in PICTURES.get(kind(stem), ()):
                path = f"{IMAGES}/results_{stem}{picture.suffix}.svg"
                written[path] = picture.draw(records[stem])
                parts.append(f"![{picture.title}]({path})")
            parts.append(section(records[stem]))
        except KeyError as error:
            raise MissingKeyError(f"{stem}.json has no {error}") from error
    missing = [name for name in SECTIONS if name not in {kind(stem) for stem in known}]
    unknown = sorted(set(records) - set(known))
    parts += [f"No results yet: {', '.join(missing)}."] if missing else []
    parts += [f"No section for: {', '.join(f'{stem}.json' for stem in unknown)}."] if unknown else []
    return {"results.md": "\n\n".join(parts) + "\n"} | written


def drift(texts: Mapping[str, str], folder: pathlib.Path) -> list[str]:
    """Paths whose file in `folder` is missing or says something else, and pictures that no result file stands for."""
    found = {path.relative_to(folder).as_posix() for path in (folder / IMAGES).glob("results_*.svg")}
    changed = [p for p, text in texts.items() if not (folder / p).is_file() or (folder / p).read_text("utf-8") != text]
    return changed + sorted(found - set(texts))


def main(arguments: Sequence[str] | None = None, results: pathlib.Path = RESULTS, docs: pathlib.Path = DOCS) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="collects results into docs/results.md and README.md"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is current")
    parsed = parser.parse_args(arguments)
    records = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(results.glob("*.json"))}
    try:
        texts = report(records)
        texts[README] = filled((docs / README).read_text("utf-8"), summary(records))
    except (MissingKeyError, MarkersError) as error:
        parser.error(str(error))
    stale = drift(texts, docs)
    if parsed.check:
        for path in stale:
            print(f"{path.removeprefix('../')} is not what the result files say: run python -m benchmarks.report")
        return 1 if stale else 0
    for path in stale:
        if path in texts:
            (docs / path).parent.mkdir(parents=True, exist_ok=True)
            (docs / path).write_text(texts[path], "utf-8")
        else:
            (docs / path).unlink()
        print(f"{'wrote' if path in texts else 'removed'} {path.removeprefix('../')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
