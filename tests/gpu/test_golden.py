"""Every golden checkpoint end to end on the GPU against transformers in float32 on the exactly dequantised weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.progress import silent

GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden").iterdir())


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_logits_match_transformers(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    tokens, logits = expected["input_ids"][0].long().cuda(), expected["logits"]
    model = Transformer.load(open_checkpoint(folder), torch.device("cuda"), torch.float16, silent)
    cache = model.new_cache(256)
    prompt = model.forward(tokens[:-8], cache)
    steps = [model.forward(token.view(1), cache) for token in tokens[-8:]]
    error = torch.cat([prompt, *steps]).cpu() - logits
    assert error.abs().max() <= 3e-3 * logits.abs().max()
    assert error.square().mean().sqrt() <= 3e-3 * logits.square().mean().sqrt()
