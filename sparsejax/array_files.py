"""Arrays in folders, through Orbax."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np


class OrbaxFiles:
    """Implements `sparsejax.cache.chain_store.ArrayFiles`: one Orbax checkpoint per folder. Any thread."""

    def save(self, folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a folder that does not exist yet."""
        import orbax.checkpoint as ocp

        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute(), dict(arrays))

    def load(self, folder: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Reads these arrays. Raises whatever Orbax makes of files that are not its own."""
        import orbax.checkpoint as ocp

        with ocp.PyTreeCheckpointer() as checkpointer:
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            return checkpointer.restore(folder.absolute(), restore_args=kinds)
