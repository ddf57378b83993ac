"""Chains in a directory: what a restart, or a server that was killed, finds again.

    DIR/lock                           held by the server that uses the directory
    DIR/manifest                       key and instance of the ids, number of boots
    DIR/chains/ID/meta                 the newest whole snapshot of one chain; replaced by a rename
    DIR/chains/ID/ids-N                its tokens, uint32, little-endian
    DIR/chains/ID/part-N/              arrays: pages in order (layer, head, column) and what is kept beside them

A snapshot is a list of parts. A later one may name parts of the one before, if the pages in them have not changed, so
only new pages are written. Whatever `meta` names was written, synced, read back and compared before `meta` is renamed
over the old one, and what it does not name any more is deleted after that: a crash at any instant leaves the old
snapshot or the new one. A snapshot that can't be read costs its own chain only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from sparsejax.cache.chain import ChainIds, digest_of
from sparsejax.errors import ConfigError

FORMAT = 1


class CorruptError(ValueError):
    """What is stored is not what was written, or of an unknown format."""


class ArrayFiles(Protocol):
    """How arrays are stored in a folder that does not exist yet."""

    def save(self, folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None: ...

    def load(self, folder: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]: ...


class Files:
    """Changes of the file system, one method each; tests stop at one of them."""

    def make_folder(self, path: pathlib.Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)

    def write(self, path: pathlib.Path, data: bytes) -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def save(self, arrays: ArrayFiles, folder: pathlib.Path, values: Mapping[str, np.ndarray]) -> None:
        arrays.save(folder, values)

    def sync(self, path: pathlib.Path) -> None:
        """Makes a file, or the names in a folder, outlive a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: pathlib.Path, target: pathlib.Path) -> None:
        source.replace(target)

    def remove(self, path: pathlib.Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, eq=False)
class SavedPart:
    """Pages on disk.

    Attributes:
      name: folder.
      start, stop: int32 [layers, heads], the columns of each head that it holds.
      arrays: name, dtype, shape and SHA-256 of each.
      files: path, bytes and SHA-256 of each.
      nbytes: of the files.
      memory_bytes: that they take in host memory.
    """

    name: str
    start: np.ndarray
    stop: np.ndarray
    arrays: tuple[dict[str, Any], ...]
    files: tuple[dict[str, Any], ...]
    nbytes: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class NewPart:
    """Pages to be written (see `SavedPart`): `arrays` by name."""

    start: np.ndarray
    stop: np.ndarray
    arrays: Mapping[str, np.ndarray]
    memory_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """A chain at the end of a turn, without its rows (see `cache.chain.Chain`). Times in seconds of `time.time`."""

    chain_id: str
    seed: bytes
    fingerprint: bytes
    fields: Mapping[str, Any]
    method: str
    tenant: str
    ledger: np.ndarray
    processed: int
    turns: int
    lengths: np.ndarray
    extra: int = 0
    cuts: Sequence[Any] = ()
    quality: Mapping[str, int | bool] = dataclasses.field(default_factory=dict)
    named: bool = False
    parent_id: str | None = None
    priority: int = 0
    ttl_s: float | None = None
    gap_s: float | None = None
    created_s: float = 0.0
    used_s: float = 0.0


_PLAIN = ("chain_id", "method", "tenant", "processed", "turns", "extra", "named", "parent_id", "priority")
_TIMES = ("ttl_s", "gap_s", "created_s", "used_s")


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """A record whose rows can be read."""

    record: Record
    number: int
    parts: tuple[SavedPart, ...]
    nbytes: int


class ChainStore:
    """One directory of chains. All but the constructor is for one background thread.

    Args:
      path: the directory; made if it does not exist.
      arrays: how arrays are stored.
      files: how files are changed.

    Attributes:
      ids: issues ids of a new boot, and recognises those of earlier ones.
      found: snapshots of earlier boots.
      dropped: what could not be used when the directory was opened, and why; it was deleted.

    Raises:
      ConfigError: the directory can't be used, or another server uses it.
    """

    def __init__(self, path: str | os.PathLike[str], arrays: ArrayFiles, files: Files | None = None) -> None:
        self.path = pathlib.Path(path)
        self._arrays = arrays
        self._files = files or Files()
        self._numbers: dict[str, int] = {}
        self.found: list[Snapshot] = []
        self.dropped: list[tuple[str, str]] = []
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("a")  # held as long as the store
        except OSError as error:
            raise ConfigError(f"--chain-dir {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError(f"--chain-dir {self.path} is in use by another server") from error
        try:
            self.ids = self._boot()
            self._scan()
        except OSError as error:
            self._lock.close()
            raise ConfigError(f"--chain-dir {self.path}: {error.strerror or error}") from error
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Another server may use the directory. Idempotent."""
        self._lock.close()

    # Boot.

    def _boot(self) -> ChainIds:
        path = self.path / "manifest"
        manifest: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            try:
                manifest = _unsealed(path.read_bytes())
                secret, instance = bytes.fromhex(manifest["secret"]), int(manifest["instance"])
                epoch = int(manifest["epoch"]) + 1
            except (CorruptError, KeyError, TypeError, ValueError) as error:
                self.dropped.append(("manifest", f"{error}; ids of earlier boots are not recognised any more"))
                manifest = {}
        if not manifest:
            secret, instance, epoch = secrets.token_bytes(32), secrets.randbits(32), 0
        self._replace(path, {"format": FORMAT, "secret": secret.hex(), "instance": instance, "epoch": epoch})
        self._files.make_folder(self.path / "chains")
        self._files.sync(self.path)
        return ChainIds(secret, instance, epoch)

    def _scan(self) -> None:
        for folder in sorted((self.path / "chains").iterdir()):
            try:
                snapshot = self._open(folder)
            except FileNotFoundError as error:
                # Killed before the first snapshot was whole: nobody was promised anything.
                whole = (folder / "meta").exists()
                reason = f"{pathlib.Path(str(error.filename)).name} is missing" if whole else "never finished"
                self._discard(folder, reason)
            except (CorruptError, KeyError, TypeError, ValueError, OSError) as error:
                self._discard(folder, f"{error}" or type(error).__name__)
            else:
                self.found.append(snapshot)
                self._clean(snapshot)

    def _discard(self, folder: pathlib.Path, reason: str) -> None:
        self.dropped.append((folder.name, reason))
        with contextlib.suppress(OSError):
            self._files.remove(folder)

    def _open(self, folder: pathlib.Path) -> Snapshot:
        """Reads what a folder holds, but for the arrays: of these only names and sizes are compared."""
        meta = _unsealed((folder / "meta").read_bytes())
        if meta["chain_id"] != folder.name:
            raise CorruptError(f"it is of another chain, {meta['chain_id']}")
        ledger = np.frombuffer(self._checked(folder, meta["ids"]), "<u4").astype(np.uint32)
        if len(ledger) != meta["token_count"] or digest_of(ledger[: meta["processed"]]).hex() != meta["digest"]:
            raise CorruptError("the tokens have another digest")
        parts = []
        for part in meta["parts"]:
            start, stop = np.array(part["start"], np.int32), np.array(part["stop"], np.int32)
            arrays, files = tuple(part["arrays"]), tuple(part["files"])
            saved = SavedPart(part["name"], start, stop, arrays, files, part["nbytes"], part["memory_bytes"])
            _check_sizes(folder, saved)
            parts.append(saved)
        record = Record(
            seed=bytes.fromhex(meta["seed"]),
            fingerprint=bytes.fromhex(meta["fingerprint"]),
            fields=meta["fields"],
            ledger=ledger,
            lengths=np.array(meta["lengths"], np.int32),
            cuts=meta.get("cuts", ()),
            quality=meta["quality"],
            **{name: meta[name] for name in (*_PLAIN, *_TIMES)},
        )
        return Snapshot(record, meta["number"], tuple(parts), meta["nbytes"])

    def _checked(self, folder: pathlib.Path, file: Mapping[str, Any]) -> bytes:
        data = (folder / file["name"]).read_bytes()
        if len(data) != file["bytes"] or _sha256(data) != file["sha256"]:
            raise CorruptError(f"{file['name']} has other bytes than were written")
        return data

    # The background thread.

    def write(self, record: Record, parts: Sequence[SavedPart | NewPart], most_bytes: int) -> Snapshot:
        """Makes a snapshot the chain's newest.

        Args:
          record: the chain.
          parts: parts of its last snapshot that are still good, and new ones; later ones replace pages of earlier ones.
          most_bytes: what the snapshot may take.

        Raises:
          OSError: the file system refused, or it takes more. The last snapshot stays.
        """
        folder = self.path / "chains" / record.chain_id
        number = self._numbers[record.chain_id] = 1 + self._number(folder)
        made: list[pathlib.Path] = []
        try:
            self._files.make_folder(folder)
            saved = []
            for i, part in enumerate(parts):
                if isinstance(part, SavedPart):
                    _check_sizes(folder, part)
                else:
                    made.append(folder / f"part-{number}-{i}")
                    part = self._save(made[-1], part)
                saved.append(part)
            ids = np.ascontiguousarray(record.ledger, "<u4").tobytes()
            made.append(folder / f"ids-{number}")
            self._files.write(made[-1], ids)
            meta = self._describe(record, number, saved, made[-1].name, ids)
            if meta["nbytes"] > most_bytes:
                raise OSError(f"the snapshot takes {meta['nbytes']} B, only {most_bytes} are left for it")
            self._replace(folder / "meta", meta)
        except (OSError, ValueError, FileNotFoundError) as error:
            for path in made:
                with contextlib.suppress(OSError):
                    self._files.remove(path)
            raise OSError(f"chain {record.chain_id} was not written: {error}") from error
        self._files.sync(self.path / "chains")
        snapshot = Snapshot(record, number, tuple(saved), meta["nbytes"])
        with contextlib.suppress(OSError):  # what is left over goes with the next snapshot, or at the next boot
            self._clean(snapshot)
        return snapshot

    def _number(self, folder: pathlib.Path) -> int:
        if folder.name in self._numbers:
            return self._numbers[folder.name]
        names = [path.name.split("-") for path in folder.iterdir()] if folder.exists() else []
        return max((int(name[1]) for name in names if len(name) > 1 and name[1].isdecimal()), default=0)

    def _save(self, folder: pathlib.Path, part: NewPart) -> SavedPart:
        """Writes arrays, and reads them back."""
        specs = [
            {"name": name, "dtype": a.dtype.str, "shape": list(a.shape), "sha256": _sha256(np.ascontiguousarray(a))}
            for name, a in part.arrays.items()
        ]
        values = {name: np.ascontiguousarray(a).reshape(-1) for name, a in part.arrays.items() if a.size}
        self._files.save(self._arrays, folder, values)
        files = []
        for path in sorted(folder.rglob("*")):
            self._files.sync(path)
            if path.is_file():
                data = path.read_bytes()
                name = path.relative_to(folder).as_posix()
                files.append({"name": name, "bytes": len(data), "sha256": _sha256(data)})
        self._files.sync(folder)
        nbytes = sum(file["bytes"] for file in files)
        saved = SavedPart(folder.name, part.start, part.stop, tuple(specs), tuple(files), nbytes, part.memory_bytes)
        self._load(folder.parent, saved)
        return saved

    def _describe(
        self, record: Record, number: int, parts: Sequence[SavedPart], ids_name: str, ids: bytes
    ) -> dict[str, Any]:
        meta = {name: getattr(record, name) for name in (*_PLAIN, *_TIMES)} | {
            "format": FORMAT,
            "number": number,
            "seed": record.seed.hex(),
            "fingerprint": record.fingerprint.hex(),
            "fields": record.fields,
            "token_count": len(record.ledger),
            "digest": digest_of(record.ledger[: record.processed]).hex(),
            "lengths": record.lengths.tolist(),
            "cuts": list(record.cuts),
            "quality": dict(record.quality),
            "ids": {"name": ids_name, "bytes": len(ids), "sha256": _sha256(ids)},
            "parts": [
                dataclasses.asdict(part) | {"start": part.start.tolist(), "stop": part.stop.tolist()} for part in parts
            ],
            "nbytes": 0,
        }
        rest = len(ids) + sum(part.nbytes for part in parts)
        while meta["nbytes"] != (nbytes := rest + len(_sealed(meta))):  # it is part of what it counts
            meta["nbytes"] = nbytes
        return meta

    def _replace(self, path: pathlib.Path, content: Mapping[str, Any]) -> None:
        """Puts a sealed record in place of another, whole."""
        new, data = path.with_name(path.name + ".new"), _sealed(content)
        self._files.write(new, data)
        if new.read_bytes() != data:
            raise OSError(f"{new.name} reads other than it was written")
        self._files.rename(new, path)
        self._files.sync(path.parent)

    def _clean(self, snapshot: Snapshot) -> None:
        """Deletes what the snapshot does not name."""
        keep = {"meta", f"ids-{snapshot.number}", *(part.name for part in snapshot.parts)}
        for path in sorted((self.path / "chains" / snapshot.record.chain_id).iterdir()):
            if path.name not in keep:
                self._files.remove(path)

    def read(self, chain_id: str, part: SavedPart) -> dict[str, np.ndarray]:
        """The arrays of one part of a chain's snapshot.

        Raises:
          CorruptError: they are not what was written.
          OSError: the file system refused.
        """
        return self._load(self.path / "chains" / chain_id, part)

    def _load(self, folder: pathlib.Path, part: SavedPart) -> dict[str, np.ndarray]:
        try:
            _check_sizes(folder, part)
            stored = [a["name"] for a in part.arrays if np.prod(a["shape"])]
            loaded = self._arrays.load(folder / part.name, stored)
        except FileNotFoundError as error:
            raise CorruptError(f"a file is missing: {error}") from error
        except OSError:
            raise
        except Exception as error:  # whatever the format's reader makes of bytes that are not its own
            raise CorruptError(f"{part.name} can't be read: {error}") from error
        arrays = {}
        for spec in part.arrays:
            name, dtype, shape = spec["name"], np.dtype(spec["dtype"]), tuple(spec["shape"])
            array = loaded.get(name, np.zeros(0, dtype))
            if array.dtype != dtype or array.size != np.prod(shape) or _sha256(array) != spec["sha256"]:
                raise CorruptError(f"{name} in {part.name} has other bytes than were written")
            arrays[name] = array.reshape(shape)
        return arrays

    def remove(self, chain_id: str) -> None:
        """Deletes what is stored of a chain: its meta first, so that nothing half deleted is ever read."""
        folder = self.path / "chains" / chain_id
        if folder.exists():
            self._files.remove(folder / "meta")
            self._files.remove(folder)
        self._numbers.pop(chain_id, None)


def _check_sizes(folder: pathlib.Path, part: SavedPart) -> None:
    for file in part.files:
        if (folder / part.name / file["name"]).stat().st_size != file["bytes"]:
            raise CorruptError(f"{part.name}/{file['name']} has another size than was written")


def _sha256(data: bytes | np.ndarray) -> str:
    return hashlib.sha256(
        data if isinstance(data, bytes) else np.ascontiguousarray(data).view(np.uint8).data
    ).hexdigest()


def _sealed(content: Mapping[str, Any]) -> bytes:
    """JSON with its own checksum in the last line."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return text + b"\n" + _sha256(text).encode() + b"\n"


def _unsealed(data: bytes) -> dict[str, Any]:
    text, _, rest = data.partition(b"\n")
    if rest.strip() != _sha256(text).encode():
        raise CorruptError("the record has another checksum")
    content = json.loads(text)
    if content.get("format") != FORMAT:
        raise CorruptError(f"format {content.get('format')} is unknown")
    return content
