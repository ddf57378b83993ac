"""The `sparsejax` command: `sparsejax serve ...` is `python -m sparsejax.serve ...`, and so on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": ("sparsejax.serve", "OpenAI-compatible HTTP server"),
    "chat": ("sparsejax.chat", "talk to a model in the terminal"),
    "collect-env": ("sparsejax.collect_env", "versions, devices and settings for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command with the remaining arguments. Returns the process's exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in COMMANDS:
        return importlib.import_module(COMMANDS[command][0]).main(arguments[1:])
    if command in {"--version", "-V"}:
        from sparsejax import __version__

        print(f"sparsejax {__version__}")
        return 0
    width = max(map(len, COMMANDS))
    usage = "\n".join(
        [
            "usage: sparsejax COMMAND [OPTIONS]",
            "",
            *(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()),
        ]
    )
    if command in {"--help", "-h"}:
        print(f"{usage}\n\nsparsejax COMMAND --help lists the options of a command.")
        return 0
    print(f"sparsejax: unknown command {command!r}\n\n{usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
