"""The GGUF reader against the `gguf` package, and against damage."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from exl2chat.errors import ModelError
from exl2chat.model.gguf_reader import read_gguf, to_float32
from tests.model import tiny_smollm2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tiny_smollm2.build(path)
    return path


def test_every_tensor_is_exact(file: Path) -> None:
    ours = read_gguf(file.read_bytes()).tensors
    theirs = gguf.GGUFReader(file).tensors
    assert ours.keys() == {tensor.name for tensor in theirs}
    for tensor in theirs:
        np.testing.assert_array_equal(to_float32(ours[tensor.name]), dequantize(tensor.data, tensor.tensor_type))
    assert {tensor.kind for tensor in ours.values()} == {"F32", "Q4_1", "Q8_0"}


def test_half_precision_tensors_are_exact(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(6, 10)).astype(np.float16)
    writer = gguf.GGUFWriter(tmp_path / "half.gguf", "llama")
    writer.add_tensor("w", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf((tmp_path / "half.gguf").read_bytes()).tensors["w"]
    np.testing.assert_array_equal(to_float32(tensor), weight.astype(np.float32))


def test_all_metadata_is_read(file: Path) -> None:
    ours = read_gguf(file.read_bytes()).metadata
    fields = {key: field for key, field in gguf.GGUFReader(file).fields.items() if not key.startswith("GGUF.")}
    assert ours.keys() == fields.keys()
    assert all(ours[key] == field.contents() for key, field in fields.items())


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    data = file.read_bytes()
    for size in [*range(0, 3000, 7), *range(3000, len(data), 997), len(data) - 40]:
        with pytest.raises(ModelError):
            read_gguf(data[:size])


def test_changed_bytes_give_a_model_error_or_other_values(file: Path) -> None:
    data = bytearray(file.read_bytes())
    rng = np.random.default_rng(2)
    refused = 0
    for position in range(0, 6000, 5):
        changed = data.copy()
        changed[position] ^= 1 << rng.integers(8)
        try:
            tensors = read_gguf(bytes(changed)).tensors.values()
            with np.errstate(invalid="ignore"):  # a moved offset makes scales of anything, infinity too
                assert all(to_float32(tensor).shape == tensor.shape for tensor in tensors)
        except ModelError:
            refused += 1
    assert refused > 100
