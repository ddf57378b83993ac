"""Chains on a mock runner with a disk tier: its thread works when the test says so, and may be killed anywhere."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from sparsejax.cache.chain_store import ChainStore, Files
from sparsejax.chain_disk import Disk, Job, Worker, perform
from sparsejax.settings import EngineSettings
from tests.contracts.test_chains import Talk

OPEN: list[ChainStore] = []
"""Stores that tests have opened, for a fixture to close."""


class PlainArrays:
    """One .npy file per array."""

    def save(self, folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
        folder.mkdir()
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)

    def load(self, folder: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: np.load(folder / f"{name}.npy") for name in names}


class Killed(BaseException):
    """The process ends here."""


class MortalFiles(Files):
    """Stops before the nth change, or in the middle of it; counts them; refuses some."""

    def __init__(self) -> None:
        self.changes = 0
        self.kill_at: int | None = None
        self.halfway = False
        self.error: OSError | None = None

    def _reached(self) -> bool:
        self.changes += 1
        if self.error is not None:
            raise self.error
        if self.changes != self.kill_at:
            return False
        if not self.halfway:
            raise Killed
        return True

    def make_folder(self, path):
        dies = self._reached()
        super().make_folder(path)
        if dies:
            raise Killed

    def write(self, path, data):
        dies = self._reached()
        super().write(path, data[: len(data) // 2] if dies else data)
        if dies:
            raise Killed

    def save(self, arrays, folder, values):
        dies = self._reached()
        super().save(arrays, folder, values)
        if dies:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            files[-1].unlink()
            for path in files[:-1]:
                path.write_bytes(path.read_bytes()[:-7])
            raise Killed

    def sync(self, path):
        dies = self._reached()
        super().sync(path)
        if dies:
            raise Killed

    def rename(self, source, target):
        dies = self._reached()
        super().rename(source, target)
        if dies:
            raise Killed

    def remove(self, path):
        dies = self._reached()
        if dies and path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file())
            for file in files[: (len(files) + 1) // 2]:
                file.unlink()
            raise Killed
        super().remove(path)
        if dies:
            raise Killed


class ManualWorker(Worker):
    """Works only when it is told to, or waited for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.finished: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def run(self, count: int | None = None) -> None:
        while self.jobs and count != 0:
            perform(self.jobs[0])
            self.finished.append(self.jobs.pop(0))
            count = None if count is None else count - 1

    def poll(self) -> list[Job]:
        done, self.finished = self.finished, []
        return done

    def wait(self, timeout_s: float) -> None:
        self.run(1)

    def close(self, timeout_s: float) -> bool:
        self.run()
        return True


class DiskTalk(Talk):
    """A `Talk` with a directory. `boot` replaces the whole engine, as if it had been killed and started again."""

    def __init__(
        self,
        path: pathlib.Path,
        settings_: EngineSettings | None = None,
        budget: int = 1 << 30,
        slow: bool = False,
        **mock: object,
    ) -> None:
        self.slow = slow
        self.path, self.settings, self.budget, self.mock = path, settings_, budget, mock
        self.files = MortalFiles()
        self.store: ChainStore | None = None
        self.boot()

    def boot(self, **changes: object) -> None:
        if self.store is not None:
            self.store.close()
        self.worker = ManualWorker()
        self.mock |= changes

        def open_disk(runner) -> Disk:
            self.store = ChainStore(self.path, PlainArrays(), self.files)
            OPEN.append(self.store)
            return Disk(self.store, runner, self.budget, self.worker)

        super().__init__(self.settings, open_disk=open_disk, **self.mock)
        if self.slow:  # most copies have to wait for others
            turn = itertools.cycle([False, False, True])
            self.tiers._may_leave = lambda: next(turn)  # type: ignore[method-assign]

    def kill(self) -> None:
        """What was not written is lost; nothing of the old process does anything any more."""
        self.boot()

    @property
    def tiers(self):
        return self.chains.tiers

    @property
    def disk(self) -> Disk:
        assert self.tiers.disk is not None
        return self.tiers.disk

    def settle(self) -> None:
        """Everything under way is written, and known to be."""
        while self.worker.jobs or self.worker.finished:
            self.worker.run()
            for seq, error in self.chains.poll():
                raise AssertionError((seq, error))
        self.bench.check()

    def stored(self) -> int:
        """Bytes of all snapshots that are in the directory, counted there."""
        return sum(path.stat().st_size for path in (self.path / "chains").rglob("*") if path.is_file())

    def end(self) -> None:
        self.bench.run()
        self.settle()
        self.index.check_integrity(deep=True)
        assert self.disk.used_bytes == self.stored()
        self.bench.check_all_free()
        self.settle()
        assert (self.disk.used_bytes, self.disk.reserved_bytes, self.tiers.staging.used_bytes) == (0, 0, 0)
        assert not list((self.path / "chains").iterdir())
