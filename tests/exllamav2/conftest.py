"""The model that most tests of this folder run, once for each of their files."""

from pathlib import Path

import pytest

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Tokenizer

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-6.0bpw-exl2"


@pytest.fixture(scope="module")
def model() -> ExLlamaV2:
    config = ExLlamaV2Config(str(MODEL))
    config.dtype = "float32"
    model = ExLlamaV2(config)
    model.load()
    return model


@pytest.fixture(scope="module")
def tokenizer() -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(ExLlamaV2Config(str(MODEL)))
