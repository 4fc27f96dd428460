"""The EXL2 writer: its files mean the weights it was given, to our reader and to a decoder made from the format."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.dequant import dequantize
from exl2chat.model.exl2_writer import Source, Tensors, quantize, write_checkpoint
from exl2chat.model.folder import open_folder
from exl2chat.model.quant import find_linear
from exl2chat.model.quant_config import QuantConfig
from exl2chat.model.tensors import read_tensor_index
from exl2chat.progress import silent

# Root mean square error over root mean square weight, for normal weights in groups of 32: what is reached, and a bit.
EXPECTED_ERROR = {8: 0.0075, 6: 0.030, 5: 0.060, 4: 0.115, 3: 0.225, 2: 0.48}


def decode(tensors: Tensors) -> np.ndarray:
    """The weights [K, N] float16 that EXL2 tensors mean, one Python integer at a time, by the format's rules."""
    words = tensors["q_weight"].view(np.uint32)
    table = tensors["q_groups"].view(np.uint16).reshape(-1, 2).tolist()
    ends = [start for _, start in table[1:]] + [len(words)]
    stored = []
    for group, ((bits, start), end) in enumerate(zip(table, ends, strict=True)):
        step = np.float16(float(Fraction(float(tensors["q_scale_max"][group])) / 256))
        columns = []
        for column in range(words.shape[1]):
            stream = sum(int(word) << (32 * i) for i, word in enumerate(words[start:end, column]))
            code = (int(tensors["q_scale"].view(np.uint32)[group, column // 8]) >> (4 * (column % 8))) & 15
            scale = float(np.float16(float((code + 1) ** 2) * float(step)))
            rows = (end - start) * 32 // bits
            levels = [((stream >> (bits * row)) & ((1 << bits) - 1)) - (1 << (bits - 1)) for row in range(rows)]
            columns.append([level * scale for level in levels])
        stored.append(np.array(columns).T)
    return np.concatenate(stored).astype(np.float16)[tensors["q_invperm"]]


def error(weight: np.ndarray, tensors: Tensors) -> float:
    difference = decode(tensors)[:, : weight.shape[1]].astype(np.float64) - weight
    return float(np.sqrt((difference**2).mean() / (weight.astype(np.float64) ** 2).mean()))


@pytest.mark.parametrize("bits", EXPECTED_ERROR)
def test_weights_come_back_within_the_width_s_error(bits: int) -> None:
    weight = np.random.default_rng(bits).normal(0, 0.1, (128, 64)).astype(np.float32)
    assert error(weight, quantize(weight, [bits] * 4)) < EXPECTED_ERROR[bits]


@pytest.mark.parametrize("size", [1e-6, 1e-4, 0.02, 1.0, 300.0])
def test_accuracy_does_not_depend_on_the_size_of_the_weights(size: float) -> None:
    """Down to where q_scale_max / 256 is a single subnormal step of 2^-24."""
    weight = (np.random.default_rng(3).normal(0, 1, (64, 32)) * size).astype(np.float32)
    tensors = quantize(weight, [8, 8])
    finest = 2.0**-24  # the smallest scale there is
    assert error(weight, tensors) < max(EXPECTED_ERROR[8], finest / size)


def test_no_other_scale_code_of_a_column_is_better() -> None:
    weight = np.random.default_rng(4).normal(0, 0.1, (32, 32)).astype(np.float32)
    tensors = quantize(weight, [4])
    reached = ((decode(tensors) - weight) ** 2).sum(axis=0)
    step = np.float16(np.float32(tensors["q_scale_max"][0]) / 256)
    scales = (np.arange(1, 17) ** 2 * float(step)).astype(np.float16).astype(np.float64)
    levels = np.clip(np.rint(weight[None] / scales[:, None, None]), -8, 7)
    best = ((levels * scales[:, None, None] - weight) ** 2).sum(axis=1).min(axis=0)
    # The four of sixteen that are tried hold the best one; a float16 weight is rounded a little more.
    np.testing.assert_allclose(reached, best, rtol=0.01)


@pytest.mark.parametrize("case", ["zero", "one column zero", "one outlier", "only negative"])
def test_unusual_matrices(case: str) -> None:
    weight = np.random.default_rng(6).normal(0, 0.1, (32, 32)).astype(np.float32)
    if case == "zero":
        weight[:] = 0
    elif case == "one column zero":
        weight[:, 7] = 0
    elif case == "one outlier":
        weight[3, 5] = 40.0
    else:
        weight = -np.abs(weight)
    decoded = decode(quantize(weight, [8])).astype(np.float32)
    # The step of a column: at most four times what it needs, at least what the group's largest column leaves it.
    step = np.maximum(np.abs(weight).max(axis=0) / 127 * 4, np.abs(weight).max() / 127 / 256)
    assert (np.sqrt(((decoded - weight) ** 2).mean(axis=0)) <= step / 2).all()


@settings(max_examples=25, deadline=None)
@given(
    widths=st.lists(st.sampled_from([8, 6, 5, 4, 3, 2]), min_size=1, max_size=5).map(lambda w: sorted(w)[::-1]),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_our_reader_and_the_format_agree_bit_for_bit(
    widths: list[int], columns: int, seed: int, tmp_path_factory
) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.normal(0, 1, (32 * len(widths), columns)) * 10.0 ** rng.uniform(-5, 1)).astype(np.float32)
    tensors = quantize(weight, widths)
    folder = tmp_path_factory.mktemp("model")
    save_file({f"w.{role}": value for role, value in tensors.items()}, folder / "model.safetensors")
    padded = -(-columns // 32) * 32
    config = QuantConfig(bits=0, group_size=0, v2=False)
    linear = find_linear(read_tensor_index(open_folder(folder)), "w", len(weight), padded, config)
    assert linear is not None
    expected = decode(tensors)
    np.testing.assert_array_equal(dequantize(linear).view(np.uint16), expected.view(np.uint16))
    assert not expected[:, columns:].any()


def tiny_source(tied: bool) -> Source:
    rng = np.random.default_rng(8)
    config = json.loads((Path(__file__).parents[1] / "data/golden/llama-fp16/config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 50, "tie_word_embeddings": tied}
    shapes = {
        "model.embed_tokens": (50, 64),
        "model.norm": (64,),
        "model.layers.0.input_layernorm": (64,),
        "model.layers.0.post_attention_layernorm": (64,),
        "model.layers.0.self_attn.q_proj": (64, 64),
        "model.layers.0.self_attn.k_proj": (32, 64),
        "model.layers.0.self_attn.v_proj": (32, 64),
        "model.layers.0.self_attn.o_proj": (64, 64),
        "model.layers.0.mlp.gate_proj": (96, 64),
        "model.layers.0.mlp.up_proj": (96, 64),
        "model.layers.0.mlp.down_proj": (64, 96),
    } | ({} if tied else {"lm_head": (50, 64)})
    weights = {f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {name: (lambda value=value: value) for name, value in weights.items()}
    return Source(config, {"tokenizer.json": b"{}\n"}, tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_opens_with_the_weights_it_was_made_of(tied: bool, tmp_path: Path) -> None:
    source = tiny_source(tied)
    calls = []
    write_checkpoint(source, tmp_path, 6, 8, lambda *call: calls.append(call))
    checkpoint = open_checkpoint(tmp_path)
    linears = [linear for layer in checkpoint.layers for linear in layer.linears]
    for linear in linears:
        weight = source.tensors[f"{linear.key}.weight"]().T
        assert np.abs(dequantize(linear).astype(np.float32) - weight).max() < 0.02
    head = source.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]().T
    assert checkpoint.head.out_features == 64
    assert np.abs(dequantize(checkpoint.head)[:, :50].astype(np.float32) - head).max() < 0.005
    written = load_file(tmp_path / "output.safetensors")
    assert written["model.norm.weight"].dtype == np.float16
    assert (tmp_path / "tokenizer.json").read_bytes() == b"{}\n"
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "exl2"
    assert (quantization["bits"], quantization["head_bits"]) == (6.0, 8)
    assert calls[-1] == ("converting to EXL2", len(linears) + 1, len(linears) + 1, "matrices")


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_checkpoint(tiny_source(tied=True), folder, 8, 8, silent)
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second
