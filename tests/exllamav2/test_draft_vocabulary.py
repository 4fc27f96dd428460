"""A draft model whose tokens mean something else is refused, not slow."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from exl2chat.errors import UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2StreamingGenerator,
)
from tests.exllamav2.conftest import MODEL


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> ExLlamaV2:
    """The model, with two tokens exchanged."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(MODEL, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    model.load()
    return model


@pytest.mark.parametrize(
    "make", [ExLlamaV2StreamingGenerator, ExLlamaV2DynamicGenerator, ExLlamaV2DynamicGeneratorAsync]
)
def test_a_draft_model_with_other_tokens_is_refused(
    make: Callable[..., Any], model: ExLlamaV2, other: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    cache, draft_cache = (ExLlamaV2Cache(each, max_seq_len=256) for each in (model, other))
    with pytest.raises(UsageError, match="draft model other has another vocabulary: its token"):
        make(model, cache, tokenizer, draft_model=other, draft_cache=draft_cache)
    make(model, cache, tokenizer, draft_model=model, draft_cache=ExLlamaV2Cache(model, max_seq_len=256))
