"""Every file of the four code folders that git knows must be in the wheel, and nothing else may be.

Usage: python .ci/check_wheel.py dist/sparsejax-*.whl
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = {"sparsejax": "sparsejax", "models": "sparsejax/models", "serving": "sparsejax/serving",
           "pallas_kernels": "sparsejax/pallas_kernels"}  # fmt: skip


def main() -> int:
    """Prints what is missing or surplus. Returns 1 if anything is."""
    listing = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = set()
    for line in listing.stdout.splitlines():
        folder, rest = line.split("/", 1)
        expected.add(f"{FOLDERS[folder]}/{rest}")
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    for name in sorted(expected - packed):
        print(f"missing from the wheel: {name}")
    for name in sorted(packed - expected):
        print(f"in the wheel, unknown to git: {name}")
    print(f"wheel: {len(packed)} files, as in the checkout" if packed == expected else "wheel: WRONG")
    return int(packed != expected)


if __name__ == "__main__":
    sys.exit(main())
