"""LoRAs as scripts written for exllamav2 name them."""

from pathlib import Path

import pytest
import torch

from exl2chat.engine.lora import Scaled, load_adapter, with_adapters
from exl2chat.errors import ModelError, UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from tests.model.lora_files import make_lora

IDS = torch.tensor([[5, 600, 7, 80, 9]])


@pytest.fixture(scope="module")
def folder(model: ExLlamaV2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = model.transformer.config
    shapes = {
        "model.layers.0.mlp.gate_proj": (config.intermediate_size, config.hidden_size),
        "model.layers.1.self_attn.q_proj": (config.num_heads * config.head_dim, config.hidden_size),
        "lm_head": (config.vocab_size, config.hidden_size),
    }
    folder = tmp_path_factory.mktemp("lora")
    make_lora(folder, shapes, size=0.2)
    return folder


def test_forward_takes_one_or_several(model: ExLlamaV2, folder: Path) -> None:
    plain = model.forward(IDS)
    lora = ExLlamaV2Lora.from_directory(model, str(folder), lora_scaling=0.5)
    adapter = load_adapter(folder, model.transformer)
    once = with_adapters(model.transformer, [Scaled(adapter, 0.5)])
    expected = once.forward(IDS[0], once.new_cache(8)).unsqueeze(0)
    assert not torch.allclose(expected, plain, atol=0.05)
    assert torch.equal(model.forward(IDS, loras=lora), expected)
    assert torch.equal(model.forward(IDS, loras=[lora]), expected)
    half = ExLlamaV2Lora(model, str(folder / "adapter_config.json"), str(folder / "adapter_model.safetensors"), 0.25)
    torch.testing.assert_close(model.forward(IDS, loras=[half, half]), expected)
    half.lora_scaling = 0.5
    assert torch.equal(model.forward(IDS, loras=[half]), expected)
    assert torch.equal(model.forward(IDS, loras=[]), plain)


def test_a_stream_takes_them(model: ExLlamaV2, folder: Path) -> None:
    lora = ExLlamaV2Lora.from_directory(model, str(folder))
    generator = ExLlamaV2StreamingGenerator(
        model, ExLlamaV2Cache(model, max_seq_len=64), ExLlamaV2Tokenizer(model.config)
    )
    generator.set_stop_conditions([])
    greedy = ExLlamaV2Sampler.Settings.greedy()
    for loras in ([lora], None, lora):
        generator.begin_stream_ex(IDS, greedy, loras=loras)
        token = generator.stream_ex()["chunk_token_ids"][0, 0]
        assert token == model.forward(IDS, loras=loras)[0, -1].argmax()
    generator.begin_stream(IDS, greedy, loras=[lora])
    assert generator.stream()[2][0, 0] == token
    assert token != model.forward(IDS)[0, -1].argmax()


def test_what_is_no_lora_is_named(model: ExLlamaV2, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="loras holds a str"):
        model.forward(IDS, loras=["lora"])  # type: ignore[list-item]
    with pytest.raises(ModelError, match="No such file"):
        ExLlamaV2Lora.from_directory(model, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"adapter_model\.bin"):
        ExLlamaV2Lora(model, str(folder / "adapter_config.json"), str(folder / "adapter_model.bin"))


def test_an_unloaded_one_is_of_no_use(model: ExLlamaV2, folder: Path) -> None:
    lora = ExLlamaV2Lora.from_directory(model, str(folder))
    lora.unload()
    with pytest.raises(UsageError, match="unloaded"):
        model.forward(IDS, loras=[lora])
