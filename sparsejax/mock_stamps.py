"""What the mock runner stores for a token: a number that depends on the whole text before it and says what it is."""

from __future__ import annotations

import numpy as np

_CELL_BITS, _TOKEN_BITS, _POSITION_BITS, _HASH_BITS = 10, 10, 20, 22
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 63-bit hash of integers; the same in every process."""
    state = 0x243F6A8885A308D3
    for value in values:
        state = ((state ^ (value & _MASK)) * 0x9E3779B97F4A7C15) & _MASK
        state ^= state >> 29
    return state >> 1


def next_stamp(last: int, token: int, position: int) -> int:
    """What stands for a token behind the one with stamp `last`. It says token and position, and has room for a cell."""
    stamp = mix(last, token, position) & ((1 << _HASH_BITS) - 1)
    stamp = stamp << _POSITION_BITS | position & ((1 << _POSITION_BITS) - 1)
    return (stamp << _TOKEN_BITS | token & ((1 << _TOKEN_BITS) - 1)) << _CELL_BITS


def tokens_of(stamps: np.ndarray) -> np.ndarray:
    """The tokens that stamps stand for, whatever their cells."""
    return stamps >> _CELL_BITS & ((1 << _TOKEN_BITS) - 1)


def positions_of(stamps: np.ndarray) -> np.ndarray:
    """The positions that stamps stand for, whatever their cells."""
    return stamps >> _CELL_BITS + _TOKEN_BITS & ((1 << _POSITION_BITS) - 1)
