"""Scripts written for exllamav2 run over our classes, compute the same as they do, and are told what is not there."""

import json
import random
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Library

from exl2chat.errors import ModelError, UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODEL = GOLDEN / "llama-6.0bpw-exl2"
SCRIPTS = Path(__file__).parent / "scripts"
Settings = ExLlamaV2Sampler.Settings


def config_of(folder: Path = MODEL) -> ExLlamaV2Config:
    config = ExLlamaV2Config(str(folder))
    config.dtype = "float32"
    return config


def loaded(config: ExLlamaV2Config) -> ExLlamaV2:
    model = ExLlamaV2(config)
    model.load()
    return model


@pytest.fixture
def generator(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2StreamingGenerator:
    return ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(MODEL / "expected.safetensors")


# Scripts


def run_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(MODEL)])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


def test_a_streaming_script_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    random.seed(3)
    run_script("stream.py", monkeypatch)
    first = capsys.readouterr().out
    assert "tokens: 20" in first
    random.seed(3)
    run_script("stream.py", monkeypatch)
    assert capsys.readouterr().out == first


def test_a_chat_script_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = iter(["hello there", "and again", "bye"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(said))
    run_script("chat.py", monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    lengths = [int(line.split()[1]) for line in lines if line.startswith("context:")]
    assert len(lengths) == 2
    assert lengths[1] > lengths[0] + 12


# The model


def test_forward_gives_the_logits_of_every_position(model: ExLlamaV2, expected: dict[str, torch.Tensor]) -> None:
    logits = model.forward(expected["input_ids"].long())
    assert logits.shape == (1, *expected["logits"].shape)
    torch.testing.assert_close(
        logits[0], expected["logits"], rtol=1e-3, atol=1e-4 * float(expected["logits"].abs().max())
    )


def test_chunks_and_a_cache_change_nothing(expected: dict[str, torch.Tensor]) -> None:
    config = config_of()
    config.max_input_len = 7
    small = loaded(config)
    ids = expected["input_ids"].long()
    whole = small.forward(ids)
    cache = ExLlamaV2Cache(small, max_seq_len=256)
    assert small.forward(ids[:, :-3], cache, preprocess_only=True) is None
    assert cache.current_seq_len == ids.shape[1] - 3
    torch.testing.assert_close(small.forward(ids[:, -3:], cache), whole[:, -3:], rtol=1e-3, atol=1e-4)
    cache.current_seq_len -= 1
    torch.testing.assert_close(
        small.forward(ids[:, -1:], cache, last_id_only=True), whole[:, -1:], rtol=1e-3, atol=1e-4
    )
    cache.reset()
    assert cache.current_seq_len == 0


def test_forward_stops_at_an_abort(model: ExLlamaV2) -> None:
    stop = Event()
    stop.set()
    assert model.forward(torch.tensor([[1, 2]]), abort_event=stop) is None


def test_rope_scaling_of_the_config_is_that_of_the_file(tmp_path: Path) -> None:
    ids = torch.arange(40).unsqueeze(0) + 5
    plain = loaded(config_of()).forward(ids)
    for field, kind in (("scale_pos_emb", "linear"), ("scale_alpha_value", "ntk")):
        folder = tmp_path / kind
        shutil.copytree(MODEL, folder)
        config = json.loads((folder / "config.json").read_text())
        scaling = {"linear": {"type": "linear", "factor": 4.0}, "ntk": {"type": "ntk", "alpha": 4.0}}[kind]
        (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
        scaled = config_of()
        setattr(scaled, field, 4.0)
        logits = loaded(scaled).forward(ids)
        torch.testing.assert_close(logits, loaded(config_of(folder)).forward(ids))
        assert not torch.allclose(logits, plain, atol=1e-2)


def test_loading_reports_progress() -> None:
    told: list[tuple[int, int]] = []
    model = ExLlamaV2(config_of())
    assert not model.loaded
    model.load(callback=lambda done, total: told.append((done, total)))
    assert model.loaded
    assert told[-1][0] == told[-1][1] > 0
    assert model.is_quant()
    model.unload()
    with pytest.raises(ModelError, match="not loaded"):
        ExLlamaV2Cache(model)


def test_a_config_must_be_read() -> None:
    with pytest.raises(UsageError, match=r"prepare\(\)"):
        ExLlamaV2Tokenizer(ExLlamaV2Config())
    with pytest.raises(UsageError, match="model_dir"):
        ExLlamaV2Config().prepare()


# The generator


def test_a_greedy_stream_is_the_argmax_of_forward(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, generator: ExLlamaV2StreamingGenerator
) -> None:
    ids = tokenizer.encode("Once upon a time", add_bos=True)
    generator.set_stop_conditions([])
    generator.begin_stream_ex(ids, Settings.greedy())
    results = [generator.stream_ex() for _ in range(10)]
    for _ in range(10):
        ids = torch.cat(
            [ids, model.forward(ids, last_id_only=True)[0, :, : tokenizer.get_vocab_size()].argmax(-1)[None]], 1
        )
    assert torch.equal(generator.sequence_ids, ids)
    assert torch.equal(torch.cat([result["chunk_token_ids"] for result in results], 1), ids[:, -10:])
    assert "".join(result["chunk"] for result in results) == tokenizer.decode(ids[0, -10:])
    assert not any(result["eos"] for result in results)
    assert not generator.full()


def test_a_stop_token_ends_the_stream(generator: ExLlamaV2StreamingGenerator) -> None:
    generator.begin_stream(torch.tensor([[5, 6, 7]]), Settings.greedy())
    _, eos, tokens = generator.stream()
    assert not eos
    generator.set_stop_conditions([int(tokens[0, 0])])
    generator.begin_stream(torch.tensor([[5, 6, 7]]), Settings.greedy())
    result = generator.stream_ex()
    assert (result["chunk"], result["eos"], result["stop_reason"]) == ("", True, "eos")
    assert result["chunk_token_ids"].shape == (1, 0)


def test_a_generator_that_was_not_begun_has_no_sequence(generator: ExLlamaV2StreamingGenerator) -> None:
    assert generator.sequence_ids is None
    generator.begin_stream(IDS, Settings.greedy())
    assert torch.equal(generator.sequence_ids, IDS)


def test_an_unknown_stop_token_is_a_value_error(
    generator: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    with pytest.raises(ValueError):
        generator.set_stop_conditions([tokenizer.single_id("<|no such token|>")])


def test_an_abort_event_ends_the_stream(generator: ExLlamaV2StreamingGenerator) -> None:
    stop = Event()
    generator.begin_stream_ex(torch.tensor([[5, 6, 7]]), Settings.greedy(), abort_event=stop)
    assert not generator.stream_ex()["eos"]
    stop.set()
    assert generator.stream_ex()["stop_reason"] == "stopped"


# What is not there yet

IDS = torch.tensor([[1, 2]])


def test_a_parameter_of_begin_stream_ex_that_is_not_known_is_named(generator: ExLlamaV2StreamingGenerator) -> None:
    with pytest.raises(UsageError, match="another is not supported yet"):
        generator.begin_stream_ex(IDS, Settings(), another=1)


UNSUPPORTED: dict[str, Callable[[ExLlamaV2], object]] = {
    "gpu_split": lambda model: ExLlamaV2(model.config).load(gpu_split=[8.0]),
    "lazy": lambda model: ExLlamaV2(model.config).load(lazy=True),
    "lazy_load": lambda model: ExLlamaV2(model.config, lazy_load=True),
    "reserve_vram": lambda model: ExLlamaV2(model.config).load_autosplit(ExLlamaV2Cache(model), reserve_vram=[1]),
    "stats": lambda model: list(ExLlamaV2(model.config).load_gen(stats=True)),
    "copy_from": lambda model: ExLlamaV2Cache(model, copy_from=ExLlamaV2Cache(model)),
    "fixed_device": lambda model: ExLlamaV2Cache(model, fixed_device=0),
    "force_spm": lambda model: ExLlamaV2Tokenizer(model.config, force_spm=True),
    "input_mask": lambda model: model.forward(IDS, input_mask=torch.ones(1, 2)),
    "return_last_state": lambda model: model.forward(IDS, return_last_state=True),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_whatever_else_is_not_supported_yet_is_named(name: str, model: ExLlamaV2) -> None:
    with pytest.raises(UsageError, match=f"{name}.* is not supported yet"):
        UNSUPPORTED[name](model)


def test_a_generator_refuses_what_it_cannot_do(generator: ExLlamaV2StreamingGenerator) -> None:
    generator.begin_stream_ex(IDS, Settings())
    with pytest.raises(UsageError, match="another"):
        generator.stream_ex(another=[1])


def test_a_draft_model_speeds_up_the_same_reply(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    sequences = []
    for drafts in ({}, {"draft_model": model, "draft_cache": ExLlamaV2Cache(model), "num_speculative_tokens": 2}):
        generator = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model), tokenizer, **drafts)  # type: ignore[arg-type]
        generator.set_stop_conditions([])
        random.seed(5)
        generator.begin_stream_ex(IDS, Settings())
        for _ in range(40):
            generator.stream_ex()
        sequences.append(generator.sequence_ids.tolist())
    assert sequences[0] == sequences[1]
    assert generator._generator.speculated.accepted > 0


def test_a_config_field_that_is_not_supported_yet_is_named() -> None:
    config = config_of()
    config.load_in_q4 = True
    with pytest.raises(UsageError, match="load_in_q4 is not supported yet"):
        ExLlamaV2(config).load()


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), torch.ones(2, 3, dtype=torch.int64), torch.ones(1, 0).long()])
def test_forward_takes_one_row(ids: torch.Tensor, model: ExLlamaV2) -> None:
    with pytest.raises(UsageError, match=r"\[1, T\]"):
        model.forward(ids)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_forward_refuses_what_is_no_token(token: int, model: ExLlamaV2) -> None:
    with pytest.raises(UsageError, match="ids that are no tokens"):
        model.forward(torch.tensor([[5, token]]))


# The tokenizer


def test_encoding_is_that_of_the_library(tokenizer: ExLlamaV2Tokenizer) -> None:
    library = Library.from_file(str(MODEL / "tokenizer.json"))
    text = "Hello, world: naïve café?"
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == [ids]
    assert tokenizer.encode(text, add_bos=True, add_eos=True).tolist() == [[0, *ids, 1]]
    assert tokenizer.num_tokens(text) == len(ids)
    assert tokenizer.decode(torch.tensor(ids)) == text
    assert tokenizer.decode(torch.tensor([ids, ids])) == [text, text]


def test_special_tokens_are_encoded_and_decoded_on_request(tokenizer: ExLlamaV2Tokenizer) -> None:
    text = "<|im_start|>hello<|im_end|>"
    ids = tokenizer.encode(text, encode_special_tokens=True)
    assert (ids[0, 0], ids[0, -1]) == (2, 3)
    assert 2 not in tokenizer.encode(text)
    assert tokenizer.decode(ids[0], decode_special_tokens=True) == text
    assert tokenizer.decode(ids[0]) == "hello"


def test_lists_are_padded_on_the_left(tokenizer: ExLlamaV2Tokenizer) -> None:
    short, long = "hi", "a longer sentence"
    ids, offsets = tokenizer.encode([short, long], return_offsets=True)
    missing = tokenizer.num_tokens(long) - tokenizer.num_tokens(short)
    assert offsets.tolist() == [-missing, 0]
    assert ids[0, :missing].tolist() == [tokenizer.pad_token_id] * missing
    assert tokenizer.decode(ids) == [short, long]
    mask = tokenizer.padding_mask(ids)
    assert mask.dtype == torch.float16
    assert (mask[0] == -65504).sum() == missing


def test_ids_and_names_of_single_tokens(tokenizer: ExLlamaV2Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 1)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.single_id("<|im_end|>") == 3
    assert tokenizer.single_id("no such token") is None
    assert tokenizer.single_token(3).tolist() == [[3]]
    assert tokenizer.decode(torch.tensor([tokenizer.newline_token_id])) == "\n"
    assert tokenizer.decode(torch.tensor([tokenizer.space_token_id])) == " "


def test_pieces_of_the_vocabulary(tokenizer: ExLlamaV2Tokenizer) -> None:
    pieces = tokenizer.get_id_to_piece_list()
    assert len(pieces) == tokenizer.get_vocab_size()
    ids = tokenizer.encode("of the people")[0].tolist()
    assert "".join(pieces[token] for token in ids) == "of the people"
    assert pieces[2] == ""
    assert tokenizer.get_id_to_piece_list(include_special_tokens=True)[2] == "<|im_start|>"
    assert tokenizer.get_piece_to_id_dict()[pieces[ids[0]]] == ids[0]
