"""safetensors folders: one file, shards with an index, several files without, and exact reading."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from exl2chat.errors import ModelError
from exl2chat.model.folder import open_folder
from exl2chat.model.tensors import INDEX, read_array, read_float32, read_tensor_index
from tests.model.model_files import write_raw

ONE = {"a": np.arange(6, dtype=np.int32).reshape(2, 3)}
TWO = {"b": np.array([1.5, -2.0], np.float16), "c": np.zeros((0, 4), np.float32)}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_values_come_back(tmp_path: Path) -> None:
    save_file(ONE | TWO, tmp_path / "model.safetensors")
    tensors = read_tensor_index(open_folder(tmp_path))
    assert sorted(tensors) == ["a", "b", "c"]
    for name, value in (ONE | TWO).items():
        read = read_array(tensors[name])
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(read, value)
    assert tensors["a"].nbytes == 24


def test_bfloat16_reads_as_bits_and_as_exact_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -3.5, 2.0**100, 0.0], np.float32)  # each a bfloat16
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = {"x": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    write_raw(tmp_path / "model.safetensors", json.dumps(header).encode(), bits.tobytes())
    info = read_tensor_index(open_folder(tmp_path))["x"]
    np.testing.assert_array_equal(read_array(info), bits.reshape(2, 2))
    np.testing.assert_array_equal(read_float32(info), values.reshape(2, 2))


def test_half_reads_as_exact_float32(tmp_path: Path) -> None:
    save_file(TWO, tmp_path / "model.safetensors")
    read = read_float32(read_tensor_index(open_folder(tmp_path))["b"])
    assert read.dtype == np.float32
    assert read.tolist() == [1.5, -2.0]


def test_shards_follow_the_index(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "one.safetensors")
    save_file(TWO, tmp_path / "two.safetensors")
    save_file(ONE, tmp_path / "consolidated.safetensors")  # the same again, which the index leaves out
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    tensors = read_tensor_index(open_folder(tmp_path))
    assert sorted(tensors) == ["a", "b", "c"]
    assert tensors["a"].file.name == "one.safetensors"


def test_files_without_an_index_are_merged(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "output-00001-of-00002.safetensors")
    save_file(TWO, tmp_path / "output-00002-of-00002.safetensors")
    assert sorted(read_tensor_index(open_folder(tmp_path))) == ["a", "b", "c"]


def test_an_index_left_over_from_the_source_model_is_ignored(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "output.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "z": "model-00002-of-00002.safetensors"})
    assert sorted(read_tensor_index(open_folder(tmp_path))) == ["a"]


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    info = read_tensor_index(open_folder(tmp_path))["a"]
    with info.file.open("r+b") as file:
        file.truncate(info.end - 4)
    with pytest.raises(ModelError, match="became shorter"):
        read_array(info)
    info.file.unlink()
    with pytest.raises(ModelError, match="No such file"):
        read_array(info)
