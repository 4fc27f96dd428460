"""Nothing but a ModelError escapes the readers: every config field becomes everything, and bytes of files flip."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from exl2chat.errors import ModelError
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.config import read_config
from exl2chat.model.dequant import dequantize
from exl2chat.model.folder import open_folder
from tests.model.model_files import EXL2, GPTQ, copy_golden, weights
from tests.model.test_model_config import BASE, arch
from tests.model.test_rope_config import LLAMA3, LONG, YARN

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1 << 20, -(1 << 70), 1 << 70, 0.0, -0.5, 0.5, 1.5, 1e-300, 1e300, "", "x",
    "full_attention", "\x1b[2J\n", "x" * 10_000, [], [0], [1, 2], ["a"], [[]], [None], [1.0] * 8, {}, {"a": 1},
    {"rope_type": "yarn"}, {"type": {}},
]  # fmt: skip
FULL = BASE | arch("Gemma2") | {
    "head_dim": 16, "sliding_window": 64, "layer_types": ["full_attention"] * 4, "max_window_layers": 2,
    "use_sliding_window": True, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "bos_token_id": 1, "pad_token_id": 0,
    "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64, "rope_scaling": None, "rope_parameters": None,
    "quantization_config": {"quant_method": "exl2"}, "text_config": {"model_type": "gemma2"},
}  # fmt: skip
OVERRULED = {"model_type", "hidden_act", "original_max_position_embeddings"}  # by others in FULL
GENERATION = {
    "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0,
}  # fmt: skip
ROPES = [
    {"rope_type": "default", "rope_theta": 1e4}, {"type": "linear", "factor": 2.0}, {"type": "dynamic", "alpha": 2.0},
    {"rope_type": "llama3"} | LLAMA3, {"type": "longrope", "factor": 2.0, "attention_factor": 1.0} | LONG,
    {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1, "truncate": True} | YARN,
    {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}},
]  # fmt: skip
QUANT = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq", "dynamic": None}


def check_refusal(error: ModelError | None, folder: Path) -> bool:
    """Whether there is an error, which must be one line that names the folder."""
    if error is None:
        return False
    assert str(error).isprintable()
    assert str(folder) in error.message
    assert len(str(error)) < 700
    return True


def is_refused(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> bool:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    try:
        read_config(open_folder(folder))
        error = None
    except ModelError as fault:
        error = fault
    return check_refusal(error, folder)


@pytest.mark.parametrize("field", FULL)
def test_config_fields(field: str, tmp_path: Path) -> None:
    assert not is_refused(tmp_path, FULL, GENERATION)
    refused = [is_refused(tmp_path, FULL | {field: value}, GENERATION) for value in VALUES]
    assert any(refused) == (field not in OVERRULED)


@pytest.mark.parametrize("field", GENERATION)
def test_generation_fields(field: str, tmp_path: Path) -> None:
    refused = [is_refused(tmp_path, FULL, GENERATION | {field: value}) for value in VALUES]
    assert any(refused)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope.get("rope_type", rope.get("type"))))
def test_rope_fields(rope: dict[str, Any], tmp_path: Path) -> None:
    assert not is_refused(tmp_path, BASE | {"rope_parameters": rope}, {})
    for field in rope:
        changed = [BASE | {"rope_parameters": rope | {field: value}} for value in VALUES]
        refused = [is_refused(tmp_path, config, {}) for config in changed]
        assert any(refused)


@pytest.mark.parametrize("field", QUANT)
def test_quantization_fields(field: str, tmp_path: Path) -> None:
    for value in VALUES:
        is_refused(tmp_path, BASE | {"quantization_config": QUANT | {field: value}}, {})


@pytest.mark.parametrize("golden", [EXL2, GPTQ])
def test_flipped_bytes(golden: str, tmp_path: Path) -> None:
    """A damaged file is refused, or it is read within its bounds and decoded."""
    chance = random.Random(golden)
    folder = copy_golden(golden, tmp_path)
    file = weights(folder)
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    refused = 0
    for _ in range(100):
        damaged = bytearray(good)
        # half of the flips in the header; the small tensors, which are checked, are what lies last
        start, end = (0, header) if chance.random() < 0.5 else (len(good) - 20_000, len(good))
        for _ in range(chance.choice((1, 4))):
            damaged[chance.randrange(start, end)] = chance.randrange(256)
        file.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(folder)
            for linear in (*checkpoint.layers[0].linears, checkpoint.layers[1].down):
                dequantize(linear)
            error = None
        except ModelError as fault:
            error = fault
        refused += check_refusal(error, folder)
    assert 20 < refused < 100
