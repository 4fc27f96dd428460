"""safetensors headers, checked before anything is read or allocated.

A file is: the header's length (8 bytes, little-endian), the header (a JSON object: name to dtype, shape and byte range
within the data), the data. Format: https://github.com/huggingface/safetensors. The checks go beyond the library's,
which accepts duplicate keys, control characters in names and ranks of any size.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from exl2chat.errors import ModelError
from exl2chat.model.folder import ModelFolder
from exl2chat.model.strict_json import parse_object

INDEX = "model.safetensors.index.json"
MAX_HEADER = 16 << 20
MAX_TENSORS = 50_000
MAX_RANK = 4
ITEM_SIZES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
DTYPES: Mapping[str, type[np.generic]] = {
    "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "F16": np.float16, "BF16": np.uint16, "F32": np.float32,
}  # fmt: skip
FLOATS = frozenset({"F16", "BF16", "F32"})
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_REMEDY = "the file is damaged; download the model again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: bytes [start, end) of `file`, row-major little-endian values of `dtype` (a key of DTYPES
    for every tensor this package reads)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"


def read_tensor_index(folder: ModelFolder) -> Mapping[str, TensorInfo]:
    """Every tensor of the folder by name. Follows the index where there is one, else takes every safetensors file.

    An index none of whose files are there is ignored: EXL2 folders often keep that of the model they were made from.
    """
    present = {name for name in folder.files if name.endswith(".safetensors")}
    if not present:
        raise ModelError(f"{folder.path}: there is no .safetensors file", "give the folder of a complete model")
    weight_map = _read_weight_map(folder)
    listed = set(weight_map.values())
    if not listed & present:
        return _merge(folder, present)
    for name in sorted(listed - present):
        raise ModelError(f"{folder.where(name)}: this shard is in the index but not there", "download the model again")
    tensors = _merge(folder, listed)
    for tensor, name in weight_map.items():
        if tensor not in tensors or tensors[tensor].file != folder.files[name]:
            raise ModelError(f"{folder.where(name)}: tensor {tensor[:80]!r} of the index is not there", _REMEDY)
    return tensors


def read_array(info: TensorInfo) -> npt.NDArray[Any]:
    """The values, shape `info.shape`; BF16 comes as uint16 bits. A copy: a file cut short later cannot hurt."""
    count = math.prod(info.shape)
    try:
        values = np.fromfile(info.file, DTYPES[info.dtype], count, offset=info.start)
    except OSError as fault:
        raise ModelError(f"{info}: {fault.strerror}", "check the file and its permissions") from None
    if values.size != count:
        raise ModelError(f"{info}: the file became shorter while it was read", _REMEDY)
    return values.reshape(info.shape)


def read_float32(info: TensorInfo) -> npt.NDArray[np.float32]:
    """The values of an F16, BF16 or F32 tensor as float32, exactly."""
    values = read_array(info)
    if info.dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _read_weight_map(folder: ModelFolder) -> Mapping[str, str]:
    index = folder.read_json(INDEX)
    if index is None:
        return {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder.where(INDEX)}: weight_map is missing or empty", _REMEDY)
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or not _NAME.fullmatch(name):
            shown = reprlib.repr(name)
            raise ModelError(f"{folder.where(INDEX)}: weight_map names {shown}, not a .safetensors file here", _REMEDY)
    return weight_map


def _merge(folder: ModelFolder, names: Iterable[str]) -> Mapping[str, TensorInfo]:
    """The tensors of several files, each tensor in one of them."""
    merged: dict[str, TensorInfo] = {}
    for name in sorted(names):
        header = _read_header(folder.files[name])
        for twice in sorted(merged.keys() & header.keys()):
            raise ModelError(f"{header[twice]} is also in {merged[twice].file.name}", "keep only one of the two files")
        merged |= header
        if len(merged) > MAX_TENSORS:
            raise ModelError(f"{folder.path}: more than {MAX_TENSORS} tensors", "this is no model we can load")
    return merged


def _read_header(file: Path) -> Mapping[str, TensorInfo]:
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ModelError(f"{file}: the header says {length} bytes in a file of {size}", _REMEDY)
            raw = handle.read(length)
    except OSError as fault:
        raise ModelError(f"{file}: {fault.strerror}", "check the file and its permissions") from None
    header = parse_object(raw, f"{file} (header)")
    header.pop("__metadata__", None)
    tensors = {name: _read_entry(name, entry, file, 8 + length) for name, entry in header.items()}
    _check_layout(tensors.values(), file, 8 + length, size)
    return tensors


def _read_entry(name: str, entry: Any, file: Path, base: int) -> TensorInfo:
    if not _NAME.fullmatch(name):
        raise ModelError(f"{file}: a tensor is called {name[:40]!r}", "letters, digits, '.', '_' and '-' are allowed")
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ModelError(f"{file}: tensor {name} has dtype {reprlib.repr(dtype)}, which we do not know", _REMEDY)
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise ModelError(f"{file}: tensor {name} has shape {reprlib.repr(shape)}", _REMEDY)
    if not _is_sizes(span) or len(span) != 2:
        raise ModelError(f"{file}: tensor {name} has data_offsets {reprlib.repr(span)}", _REMEDY)
    start, end = span
    if end - start != math.prod(shape) * ITEM_SIZES[dtype]:
        raise ModelError(f"{file}: tensor {name} of {dtype} {shape} does not take {end - start} bytes", _REMEDY)
    return TensorInfo(name, file, dtype, tuple(shape), base + start, base + end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_layout(tensors: Iterable[TensorInfo], file: Path, base: int, size: int) -> None:
    """The data area is tiled without hole or overlap, to the last byte of the file."""
    position = base
    for info in sorted(tensors, key=lambda info: (info.start, info.end)):
        if info.start != position:
            raise ModelError(f"{file}: tensor {info.name} starts at byte {info.start}, not at {position}", _REMEDY)
        position = info.end
    if position != size:
        raise ModelError(f"{file}: is {size} bytes long; its header describes {position}", _REMEDY)
