"""Models, caches and tokenizers as public scripts for exllamav2 make them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exl2chat.errors import UsageError
from exl2chat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    ExLlamaV2VisionTower,
    model_init,
)
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from exl2chat.exllamav2.server import ExLlamaV2WebSocketServer
from tests.exllamav2.conftest import MODEL

QUANTISED = [ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8]


def unloaded() -> ExLlamaV2:
    config = ExLlamaV2Config()
    config.model_dir = str(MODEL)
    config.prepare()
    config.dtype = "float32"
    return ExLlamaV2(config)


def parsed(*options: str) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("-mode", "--mode", default="raw")  # scripts have options of their own
    model_init.add_args(parser)
    return parser.parse_args(["-m", str(MODEL), *options])


# Loading


def percent(done: int, total: int) -> Iterator[int]:
    if total:
        yield 100 * done // total


def test_a_model_can_be_loaded_step_by_step() -> None:
    model, seen = unloaded(), []
    steps = list(model.load_gen(callback=lambda *step: seen.append(step), callback_gen=percent))
    assert model.loaded
    assert steps == sorted(steps)
    assert (steps[-1], seen[-1][0] == seen[-1][1]) == (100, True)


def test_a_cache_is_made_when_the_model_is_there() -> None:
    model = unloaded()
    cache = ExLlamaV2Cache_Q8(model, max_seq_len=512, lazy=True)
    assert list(model.load_autosplit_gen(cache, callback_gen=percent))[-1] == 100
    assert sum(cache.footprint()) > 0


def test_an_error_of_a_load_is_raised_where_its_steps_are_taken() -> None:
    model = unloaded()
    model.config.load_in_q4 = True
    with pytest.raises(UsageError, match="load_in_q4"):
        list(model.load_gen(callback_gen=percent))
    assert not model.loaded


def test_settings_of_other_kernels_change_nothing(model: ExLlamaV2) -> None:
    other = unloaded()
    config = other.config
    config.max_batch_size, config.max_output_len, config.max_input_len = 4, 16, 5
    config.no_flash_attn = config.no_xformers = config.no_sdpa = config.no_graphs = True
    config.scale_pos_emb = config.scale_alpha_value = None  # as an option that was not given
    other.load()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    torch.testing.assert_close(other.forward(ids), model.forward(ids))


# Options of the command line


def test_options_make_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed("-l", "300", "-nfa", "-lm", "-rs", "2.0")
    model_init.check_args(args)
    model_init.print_options(args)
    assert "--length 300 --rope_scale 2.0 --no_flash_attn --low_mem" in capsys.readouterr().out.replace("\n", " ")
    model, tokenizer = model_init.init(args, max_output_len=16, skip_load=True)
    assert (model.loaded, model.config.max_seq_len, model.config.max_input_len) == (False, 300, 1024)
    assert model.config.scale_pos_emb == 2.0
    model_init.post_init_load(model, args, allow_auto_split=True)
    assert model.loaded
    assert tokenizer.encode("Hello").shape[0] == 1


def test_auto_split_leaves_loading_to_the_script() -> None:
    model, _ = model_init.init(parsed("-gs", "auto"), allow_auto_split=True)
    assert not model.loaded
    model.load_autosplit(ExLlamaV2Cache(model, max_seq_len=256, lazy=not model.loaded))
    assert model.loaded
    with pytest.raises(UsageError, match="-gs auto"):
        model_init.init(parsed("-gs", "auto"))


@pytest.mark.parametrize("options", [("-tp",), ("-ept", "3"), ("-ry", "4.0"), ("-gs", "18,24"), ("-lq4",)])
def test_an_option_that_is_not_supported_yet_is_named(options: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="is not supported yet"):
        model_init.init(parsed(*options))


def test_a_folder_that_is_not_there_ends_the_script(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no model folder"):
        model_init.check_args(Namespace(model_dir=str(tmp_path / "nowhere")))


# Caches


def test_fewer_bits_take_less_memory(model: ExLlamaV2) -> None:
    caches: list[ExLlamaV2CacheBase] = [kind(model, max_seq_len=512) for kind in (*QUANTISED, ExLlamaV2Cache)]
    assert all(isinstance(cache, ExLlamaV2CacheBase) for cache in caches)
    sizes = [cache.footprint()[0] for cache in caches]
    assert sizes == sorted(set(sizes))
    assert ExLlamaV2Cache_8bit(model, max_seq_len=512).footprint() == [sizes[2]]


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_cache_is_nearly_as_good(
    kind: type[ExLlamaV2Cache], model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    ids = tokenizer.encode("The people of the town had been waiting for the train since the morning", add_bos=True)
    cache = kind(model, max_seq_len=256)
    model.forward(ids[:, :-1], cache, preprocess_only=True)
    logits, exact = model.forward(ids[:, -1:], cache), model.forward(ids, last_id_only=True)
    assert logits is not None
    assert exact is not None
    assert torch.cosine_similarity(logits.flatten(), exact.flatten(), 0) > (0.8 if kind.bits == 4 else 0.98)
    stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    stream.set_stop_conditions([])
    stream.begin_stream_ex(ids, ExLlamaV2Sampler.Settings.greedy())
    assert sum(stream.stream_ex()["chunk_token_ids"].shape[1] for _ in range(8)) > 0


def test_what_makes_no_sense_is_refused(model: ExLlamaV2) -> None:
    for sizes in ({"batch_size": 0}, {"max_seq_len": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            ExLlamaV2Cache(model, **sizes)


# What other packages ask of a tokenizer


def test_the_vocabulary_is_open_to_packages_that_make_grammars_of_it(tokenizer: ExLlamaV2Tokenizer) -> None:
    for vocabulary in (tokenizer.tokenizer, tokenizer.tokenizer_model):
        assert vocabulary.vocab_size() == len(vocabulary.vocab) == tokenizer.actual_vocab_size
        assert vocabulary.id_to_piece(5) == vocabulary.vocab[5] == tokenizer.native.token_of(5)
    special = tokenizer.extended_id_to_piece
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} <= special.keys()
    assert tokenizer.extended_piece_to_id == {piece: token_id for token_id, piece in special.items()}


# What is not here


@pytest.mark.parametrize("absent", [ExLlamaV2Cache_TP, ExLlamaV2VisionTower, ExLlamaV2WebSocketServer])
def test_a_name_without_anything_behind_it_says_so(absent: type, model: ExLlamaV2) -> None:
    with pytest.raises(UsageError, match=f"{absent.__name__} is not supported"):
        absent(model, max_seq_len=16)


def test_a_model_is_not_split(model: ExLlamaV2) -> None:
    with pytest.raises(UsageError, match="load_autosplit, on one device"):
        ExLlamaV2(model.config).load_tp(progress=True, expect_cache_tokens=1024)
