"""Folders as transformers saves them today: every architecture, in one file and in shards with an index."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from exl2chat.model.arch import ARCHITECTURES
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tensors import INDEX, read_float32

NAMES = [name.removesuffix("ForCausalLM") for spec in ARCHITECTURES for name in spec.names]
SHAPE = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_opens_with_every_weight(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**SHAPE)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if dtype == torch.float32 else "1GB")
    assert (tmp_path / INDEX).exists() == (dtype == torch.float32)

    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.eos_ids == {2, 3}
    found = [checkpoint.embedding, checkpoint.final_norm, *checkpoint.head.tensors.values()]
    for layer in checkpoint.layers:
        found += [*layer.norms.values(), *(info for linear in layer.linears for info in linear.tensors.values())]
    values = {info.name: read_float32(info) for info in found}
    expected = {
        key: value
        for key, value in model.state_dict().items()
        if not config.tie_word_embeddings or key != "lm_head.weight"
    }
    missing = {key for key in expected if key not in values}
    assert all(key.endswith(".bias") and not expected[key].any() for key in missing)  # biases start as zeros
    for key, value in values.items():
        np.testing.assert_array_equal(value, expected[key].float().numpy())
