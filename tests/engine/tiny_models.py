"""Small random models that compute in float32, over a vocabulary of bytes and a few marks."""

import functools

import torch

from exl2chat.engine.shapes import Shape, random_model
from exl2chat.engine.transformer import Transformer
from exl2chat.progress import silent
from tests.engine.fake_model import VOCABULARY

BYTES_SHAPE = Shape("a model of bytes", 64, 96, 2, 4, 2, 16, VOCABULARY)


@functools.cache
def byte_model() -> Transformer:
    """What it writes depends on all of its text; its logits are spread over several units."""
    torch.manual_seed(5)
    return random_model(BYTES_SHAPE, torch.device("cpu"), torch.float32, silent)
