"""A bounded reader of GGUF, as far as the default model needs it: metadata, and tensors in F32, F16, Q4_1 and Q8_0.

Format: the GGUF specification, versions 2 and 3 (little-endian). Everything is checked against the length of the data
before it is read, so a damaged file gives a ModelError and nothing else.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exl2chat.errors import ModelError

DAMAGED = "it is damaged: delete it and fetch it again"
MAX_ENTRIES = 1_000_000
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# ggml type number -> (its name, values per block, bytes per block)
BLOCKS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` in numpy order (rows first), `kind` a name in BLOCKS, `data` its bytes."""

    shape: tuple[int, ...]
    kind: str
    data: memoryview


@dataclass(frozen=True, slots=True)
class Gguf:
    """A whole file: metadata by key, tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Cursor:
    """Reads forward through the bytes; ModelError at their end."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.position = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.position:
            raise ModelError("the GGUF file ends too early", DAMAGED)
        piece = self.data[self.position : self.position + size]
        self.position += size
        return piece

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        value: int = self.number("Q")
        if value > MAX_ENTRIES:
            raise ModelError(f"the GGUF file claims {value} entries", DAMAGED)
        return value

    def string(self) -> str:
        return str(self.take(self.number("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.number("I"), self.count()
            if item != ARRAY:
                return [self.value(item) for _ in range(count)]
        raise ModelError(f"the GGUF file has a metadata value of unknown type {kind}", DAMAGED)


def read_gguf(data: bytes) -> Gguf:
    """`data` as metadata and tensors (views, nothing is copied). ModelError where it is damaged."""
    cursor = _Cursor(data)
    magic, version = bytes(cursor.take(4)), cursor.number("I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ModelError("this is not a GGUF file of version 2 or 3", "fetch the file again")
    tensor_count, entry_count = cursor.count(), cursor.count()
    metadata = {}
    for _ in range(entry_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"the GGUF file has the alignment {alignment!r}", DAMAGED)
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(cursor, start + offset, shape, kind) for name, shape, kind, offset in infos}
    return Gguf(metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape in numpy order, ggml type number and offset of the next tensor."""
    name, rank = cursor.string(), cursor.number("I")
    if rank > 4:
        raise ModelError(f"the GGUF tensor {name} has {rank} dimensions", DAMAGED)
    shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensor(cursor: _Cursor, start: int, shape: tuple[int, ...], kind: int) -> GgufTensor:
    """The tensor whose bytes begin at `start`."""
    if kind not in BLOCKS:
        raise ModelError(f"the GGUF file has a tensor of type {kind}", "F32, F16, Q4_1 and Q8_0 are read")
    name, values, size = BLOCKS[kind]
    blocks, rest = divmod(math.prod(shape), values)
    if rest:
        raise ModelError(f"the GGUF file has a {name} tensor of shape {shape}", DAMAGED)
    cursor.position = start
    return GgufTensor(shape, name, cursor.take(blocks * size))


def to_float32(tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """The tensor's values, float32, in `tensor.shape`.

    A block of 32 values is, in Q8_0, a float16 scale d and 32 signed bytes q, w = d q; in Q4_1 float16 d and m and 16
    bytes, w = d q + m, where the low nibbles are values 0 to 15 and the high ones 16 to 31.
    """
    if tensor.kind in ("F32", "F16"):
        dtype = np.float32 if tensor.kind == "F32" else np.float16
        return np.frombuffer(tensor.data, dtype).astype(np.float32).reshape(tensor.shape)
    if tensor.kind == "Q8_0":
        blocks = np.frombuffer(tensor.data, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
        return (blocks["q"] * blocks["d"].astype(np.float32)[:, None]).reshape(tensor.shape)
    blocks = np.frombuffer(tensor.data, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]))
    codes = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
    scale, low = (blocks[field].astype(np.float32)[:, None] for field in ("d", "m"))
    return (codes * scale + low).reshape(tensor.shape)
