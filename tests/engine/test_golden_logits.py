"""Logits of the golden checkpoints against transformers in float32 on the exactly dequantised weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.progress import silent

GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden").iterdir())
# float16 rounds activations to 11 bits, bfloat16 to 8: eight times as coarse.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_logits_match_transformers(folder: Path, dtype: torch.dtype) -> None:
    expected = load_file(folder / "expected.safetensors")
    tokens, logits = expected["input_ids"][0].long(), expected["logits"]
    model = Transformer.load(open_checkpoint(folder), torch.device("cpu"), dtype, silent)
    cache = model.new_cache(256)
    prompt = model.forward(tokens[:-8], cache)
    steps = [model.forward(token.view(1), cache) for token in tokens[-8:]]
    error = torch.cat([prompt, *steps]) - logits
    assert error.abs().max() <= TOLERANCE[dtype] * logits.abs().max()
    assert error.square().mean().sqrt() <= TOLERANCE[dtype] * logits.square().mean().sqrt()
