"""Progress bars in bytes."""

from __future__ import annotations

from typing import Any


def bytes_bar(total_bytes: int, label: str, enabled: bool = True) -> Any:
    """A tqdm bar on a terminal; silent where stderr is not one, or when not enabled."""
    from tqdm import tqdm

    return tqdm(
        total=total_bytes, desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=None if enabled else True
    )
