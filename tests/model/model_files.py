"""Model folders for tests: copies of golden ones to edit, and random quantised matrices with their exact weights.

The packing follows the formats' bit-stream rule with Python integers, so that nothing here can share a mistake with
the code under test.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from exl2chat.model.folder import open_folder
from exl2chat.model.quant import Linear, find_linear
from exl2chat.model.quant_config import QuantConfig
from exl2chat.model.tensors import read_tensor_index

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
EXL2, GPTQ, PLAIN = "llama-3.0bpw-exl2", "llama-gptq4-g128-actorder-sym", "llama-fp16"
Tensors = dict[str, np.ndarray]


def copy_golden(name: str, to: Path) -> Path:
    """A writable copy of the golden model `name` as `to`/model: its config and its weights."""
    folder = to / "model"
    folder.mkdir()
    for file in ("config.json", weights_name(name)):
        shutil.copyfile(GOLDEN / name / file, folder / file)
    return folder


def weights_name(name: str) -> str:
    return "output.safetensors" if name.endswith("exl2") else "model.safetensors"


def weights(folder: Path) -> Path:
    """The one weight file of a copied golden model."""
    return next(folder.glob("*.safetensors"))


def edit_json(folder: Path, changes: Mapping[str, Any], file: str = "config.json") -> None:
    """Sets fields of a JSON file, made if needed; a value of `...` removes the field."""
    path = folder / file
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (table | changes).items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Rewrites the weight file after `change` was let loose on its tensors."""
    tensors = load_file(weights(folder))
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, weights(folder))


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a safetensors file."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def write_raw(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the header of the weight file; the data stays as it is."""
    header, data = read_header(weights(folder))
    change(header)
    write_raw(weights(folder), json.dumps(header).encode(), data)


def pack_column(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of one column as int32 words: the little-endian bit string in which code i takes bits [i b, (i + 1) b)."""
    stream = int("".join(format(code, f"0{bits}b") for code in reversed(codes.tolist())), 2)
    return np.frombuffer(stream.to_bytes(len(codes) * bits // 8, "little"), np.int32)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, N] packed down the rows."""
    return np.stack([pack_column(column, bits) for column in codes.T], axis=1)


def random_exl2(plan: list[tuple[int, int]], columns: int, seed: int) -> tuple[Tensors, np.ndarray]:
    """(tensors, weight float16 [K, N]) of an EXL2 matrix with groups of (bits, rows), in that order."""
    rng = np.random.default_rng(seed)
    words, table, rows = [], [], []
    nibbles = rng.integers(0, 16, (len(plan), columns))
    maxima = rng.uniform(2e-4, 8e-2, len(plan)).astype(np.float16)
    for (bits, height), codes_of_scale, maximum in zip(plan, nibbles, maxima, strict=True):
        table += [bits, sum(len(block) for block in words)]
        codes = rng.integers(0, 1 << bits, (height, columns))
        words.append(pack(codes, bits))
        unit = np.float64(np.float16(np.float64(maximum) / 256))
        scale = np.float16((codes_of_scale + 1.0) ** 2 * unit).astype(np.float64)
        rows.append(np.float16((codes - (1 << (bits - 1))) * scale))
    inverse = rng.permutation(sum(height for _, height in plan))
    tensors = {
        "q_weight": np.concatenate(words),
        "q_groups": np.array(table, np.uint16).view(np.int16),
        "q_scale": pack(nibbles.T, 4).T,
        "q_scale_max": maxima,
        "q_invperm": inverse.astype(np.int32),
    }
    return tensors, np.concatenate(rows)[inverse]


def random_gptq(
    bits: int, rows: int, columns: int, group_of: np.ndarray, seed: int, v2: bool = False
) -> tuple[Tensors, np.ndarray]:
    """(tensors with g_idx, weight float16 [K, N]) of a GPTQ matrix whose row k is in group group_of[k]."""
    rng = np.random.default_rng(seed)
    groups = int(group_of.max()) + 1
    codes = rng.integers(0, 1 << bits, (rows, columns))
    zeros = rng.integers(0, 1 << bits, (groups, columns))
    scales = rng.uniform(1e-3, 3e-2, (groups, columns)).astype(np.float16)
    tensors = {
        "qweight": pack(codes, bits),
        "qzeros": pack(zeros.T, bits).T,
        "scales": scales,
        "g_idx": group_of.astype(np.int32),
    }
    shifted = codes - (zeros + (0 if v2 else 1))[group_of]
    return tensors, np.float16(shifted * scales[group_of].astype(np.float64))


def save_linear(folder: Path, tensors: Tensors, shape: tuple[int, ...], config: QuantConfig) -> Linear:
    """The tensors of one matrix [K, N] written to a file and found again."""
    named = {f"w.{role}": np.ascontiguousarray(value) for role, value in tensors.items()}
    save_file(named, folder / "model.safetensors")
    linear = find_linear(read_tensor_index(open_folder(folder)), "w", *shape, config)
    assert linear is not None
    return linear
