"""The GGUF container: metadata and tensor index, without copying tensor bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The `gguf` package's
own reader makes a numpy view per string, which takes seconds on a vocabulary; this one takes a tenth of a second.
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from sparsejax.errors import LoadError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file.

    Attributes:
      shape: row-major (the file lists axes the other way round).
      quant_type: ggml type number.
      data: uint8 view of its bytes in the mapped file, [rows, bytes per row] (or [bytes] of a vector).
    """

    name: str
    shape: tuple[int, ...]
    quant_type: int
    data: np.ndarray

    def dequantize(self) -> np.ndarray:
        """Float array of `shape`, in float32 or the stored float type. Raises LoadError for types gguf can't decode."""
        import gguf
        import ml_dtypes

        kind = gguf.GGMLQuantizationType(self.quant_type)
        if kind == gguf.GGMLQuantizationType.F32:
            return self.data.view(np.float32).reshape(self.shape)
        if kind == gguf.GGMLQuantizationType.F16:
            return self.data.view(np.float16).reshape(self.shape)
        if kind == gguf.GGMLQuantizationType.BF16:
            return self.data.view(ml_dtypes.bfloat16).reshape(self.shape)
        try:
            return gguf.dequantize(self.data, kind).reshape(self.shape)
        except NotImplementedError:
            raise LoadError(f"tensor {self.name}: the gguf package can't dequantise {kind.name}") from None


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A parsed file. Arrays of numbers in `metadata` are numpy arrays, arrays of strings are lists."""

    path: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: str | pathlib.Path) -> GgufFile:
    """Maps and parses a GGUF file. Raises LoadError if it is damaged, truncated or of an unknown version."""
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from None
    try:
        return _parse(path, mapped)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise LoadError(f"{path} is damaged or truncated: {type(error).__name__}: {error}") from None


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.offset = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.buffer, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        end = self.offset + length
        if end > len(self.buffer):
            raise IndexError(f"a string of {length} bytes runs past the end of the file")
        value = self.buffer[self.offset : end].decode("utf-8", errors="surrogateescape")
        self.offset = end
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item == _ARRAY:
            return [self.value(item) for _ in range(count)]
        if item == _STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype(_SCALARS[item].replace("<?", "?"))
        if self.offset + count * dtype.itemsize > len(self.buffer):
            raise IndexError(f"an array of {count} items runs past the end of the file")
        array = np.frombuffer(self.buffer, dtype, count, self.offset)
        self.offset += array.nbytes
        return array


def _parse(path: pathlib.Path, mapped: mmap.mmap) -> GgufFile:
    import gguf

    cursor = _Cursor(mapped)
    if mapped[:4] != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file")
    cursor.offset = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise LoadError(f"{path} is GGUF version {version}; versions 2 and 3 (little endian) are supported")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    entries = []
    for _ in range(num_tensors):
        name, num_dimensions = cursor.string(), cursor.scalar("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise LoadError(f"{path} is damaged: tensor {name} has {num_dimensions} dimensions")
        shape = tuple(cursor.scalar("<Q") for _ in range(num_dimensions))[::-1]
        entries.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.offset // alignment) * alignment
    whole = np.frombuffer(mapped, np.uint8)
    tensors = {}
    for name, shape, quant_type, offset in entries:
        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(quant_type)]
        except (ValueError, KeyError):
            raise LoadError(f"{path}: tensor {name} has unknown quantisation type {quant_type}") from None
        if not shape or shape[-1] % block:
            raise LoadError(f"{path} is damaged: tensor {name} of shape {shape} is not whole blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        num_rows = int(np.prod(shape[:-1], dtype=np.int64))
        begin, end = start + offset, start + offset + num_rows * row_bytes
        if end > len(whole):
            raise LoadError(f"{path} is truncated: tensor {name} ends at byte {end}, the file has {len(whole)}")
        data = whole[begin:end]
        tensors[name] = GgufTensor(name, shape, quant_type, data if len(shape) == 1 else data.reshape(-1, row_bytes))
    return GgufFile(path, metadata, tensors)
