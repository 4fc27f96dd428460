"""What the worker does, with a real tiny model: everything but the pipe."""

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from exl2chat.engine.lora import load_adapter
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ModelError
from exl2chat.link import host
from exl2chat.link import protocol as wire
from exl2chat.link.service import Service
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.paths import Paths
from exl2chat.settings import Sampling
from tests.link.serving import LOAD, MODEL, ask, last, serve, text_of
from tests.model.lora_files import make_lora
from tests.model.tokenizer_files import write_tokenizer


@pytest.mark.parametrize("speculate", ["ngram", "draft", "auto"])
def test_a_reply_with_drafts_is_that_without_and_says_what_they_did(tmp_path, speculate):
    replies = []
    for load in (
        msgspec.structs.replace(LOAD, speculate="off"),
        msgspec.structs.replace(LOAD, speculate=speculate, draft_model=None if speculate == "ngram" else MODEL),
    ):
        sampling = Sampling(temperature=1.0, seed=3, allowed_tokens=tuple(range(70, 74)))
        events = serve(tmp_path, load, ask(max_tokens=120, sampling=sampling))
        replies.append("".join(event.text for event in events if isinstance(event, wire.Chunk)))
    assert replies[0] == replies[1] != ""
    stats = events[-1].stats
    assert 0 < stats.accepted <= stats.drafted
    assert stats.speed_up > 0


def test_a_reply_streams_prefill_chunks_and_statistics(tmp_path):
    events = serve(tmp_path, LOAD, ask())
    finished = last(events)
    prefill = [event for event in events if isinstance(event, wire.Prefill)]
    assert prefill[-1].done == prefill[-1].total == finished.stats.prompt_tokens
    assert (finished.reason, finished.stats.reply_tokens) == ("max_tokens", 8)
    assert finished.stats.first_token_s > 0
    assert finished.stats.decode_s > 0
    assert text_of(events)
    assert [event.tokens for event in events if isinstance(event, wire.Chunk)][-1] == 8


def test_the_next_turn_reuses_what_is_cached_and_the_seed_reproduces(tmp_path):
    sampling = Sampling(temperature=1.5, seed=11)
    events = serve(tmp_path, LOAD, ask("a", sampling=sampling), ask("b", sampling=sampling))
    assert last(events, "a").stats.cached_tokens == 0
    assert last(events, "b").stats.cached_tokens == last(events, "a").stats.prompt_tokens - 1
    assert text_of(events, "a") == text_of(events, "b") != ""
    assert last(events, "b").stats.seed == 11


def test_a_reply_uses_its_own_loras_each_read_once(tmp_path, monkeypatch):
    folder, broken = tmp_path / "lora", tmp_path / "nowhere"
    config = open_checkpoint(Path(MODEL)).config
    make_lora(folder, {"model.layers.0.mlp.gate_proj": (config.intermediate_size, config.hidden_size)}, size=2)
    read = []
    monkeypatch.setattr(host, "load_adapter", lambda path, model: read.append(path) or load_adapter(path, model))

    def use(*loras):
        return tuple(wire.LoraUse(str(path), scale) for path, scale in loras)

    def asks(*names):
        uses = {
            "none": (),
            "full": use((folder, 1)),
            "half": use((folder, 0.5)),
            "two": use((folder, 0.5), (folder, 0.5)),
        }
        return (ask(str(number) + name, loras=uses[name]) for number, name in enumerate(names))

    names = ("none", "full", "half", "full", "full", "two", "none")
    events = serve(tmp_path, LOAD, *asks(*names), ask("broken", loras=use((broken, 1))), ask("after"))
    replies = [text_of(events, f"{number}{name}") for number, name in enumerate(names)]
    assert len(set(replies[:3])) == 3
    assert replies[3:] == [replies[1], replies[1], replies[1], replies[0]]
    cached = [last(events, f"{number}{name}").stats.cached_tokens for number, name in enumerate(names)]
    assert [number for number, count in enumerate(cached) if count] == [4]
    assert (last(events, "broken").status, text_of(events, "after")) == (ModelError.status, replies[0])
    assert "nowhere: No such file" in last(events, "broken").message
    assert read == [folder, broken]


def test_an_assistant_turn_at_the_end_is_continued(tmp_path):
    whole = serve(tmp_path, LOAD, ask(max_tokens=6))
    begun = "".join(event.text for event in whole if isinstance(event, wire.Chunk) and event.tokens <= 3)
    turns = (wire.Turn("user", "hello there"), wire.Turn("assistant", begun))
    rest = serve(tmp_path, LOAD, wire.Generate("a", turns, Sampling(temperature=0), 3))
    assert last(rest).reason == "max_tokens"
    assert last(rest).stats.prompt_tokens > last(whole).stats.prompt_tokens


@pytest.mark.parametrize("begun", ["", "The capital"])
def test_a_reply_that_is_continued_keeps_the_space_before_its_next_word(tmp_path, monkeypatch, begun):
    """With a tokenizer that puts a space before every text and drops it again from the decoded text."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    tokenizer = open_tokenizer(write_tokenizer(folder, "phi3"))
    (word,) = tokenizer.encode("is")
    assert tokenizer.token_of(word) == "▁is"
    forward = Transformer.forward

    def sure(*args, **kwargs):
        logits = forward(*args, **kwargs).clone()
        logits[:, word] = 1e9
        return logits

    monkeypatch.setattr(Transformer, "forward", sure)
    turns = (wire.Turn("user", "hello"), wire.Turn("assistant", begun)) if begun else (wire.Turn("user", "hello"),)
    events = serve(tmp_path, wire.Load(str(folder), context=512), wire.Generate("a", turns, Sampling(temperature=0), 2))
    assert text_of(events) == (" is is" if begun else "is is")


def test_a_stop_ends_the_reply_within_one_token_and_the_next_one_works(tmp_path):
    def react(event):
        return wire.Stop("a") if isinstance(event, wire.Chunk) and event.id == "a" and event.tokens == 3 else None

    events = serve(tmp_path, LOAD, ask(max_tokens=200), ask("b"), react=react)
    assert last(events).reason == "stopped"
    assert last(events).stats.reply_tokens <= 4
    assert last(events, "b").reason == "max_tokens"


def test_a_stop_for_a_queued_reply_ends_it_before_it_begins(tmp_path):
    def react(event):
        return wire.Stop("b") if isinstance(event, wire.Chunk) and event.id == "a" else None

    events = serve(tmp_path, LOAD, ask("a"), ask("b"), react=react)
    assert last(events, "a").reason == "max_tokens"
    assert (last(events, "b").reason, last(events, "b").stats.reply_tokens) == ("stopped", 0)


def test_a_stop_string_ends_the_reply_and_stays_out_of_it(tmp_path):
    whole = text_of(serve(tmp_path, LOAD, ask()))
    wanted = whole[len(whole) // 2 : len(whole) // 2 + 3]
    events = serve(tmp_path, LOAD, ask(stop=(wanted,)))
    assert last(events).reason == "stop_string"
    assert text_of(events) == whole[: whole.index(wanted)]


def test_a_prompt_that_does_not_fit_fails_with_status_4_and_the_model_stays(tmp_path):
    events = serve(tmp_path, LOAD, ask("a", "word " * 2000), ask("b"))
    assert last(events, "a").status == 4
    assert "512" in last(events, "a").message
    assert last(events, "b").reason == "max_tokens"


def test_a_new_conversation_is_advised_only_where_there_is_an_old_one(tmp_path):
    alone = ask("a", text="word " * 600)
    turns = (wire.Turn("user", "hi"), wire.Turn("assistant", "yes"), *alone.turns)
    events = serve(tmp_path, LOAD, alone, msgspec.structs.replace(alone, id="b", turns=turns))
    assert last(events, "a").remedy == "shorten it, or load the model with a larger --ctx"
    assert "start a new conversation" in last(events, "b").remedy


def test_a_reply_to_nothing_is_refused_and_the_model_stays(tmp_path):
    events = serve(tmp_path, LOAD, wire.Generate("a", ()), ask("b"))
    assert (last(events).message, last(events).status) == ("there is no message to answer", 2)
    assert last(events, "b").reason == "max_tokens"


def test_shutdown_ends_a_reply_in_hand(tmp_path):
    events = []

    def emit(event):
        events.append(event)
        if isinstance(event, wire.Chunk):
            service.submit(wire.Shutdown())

    service = Service(Paths.default(tmp_path), emit)
    service.submit(LOAD)
    service.submit(ask(max_tokens=400))
    thread = threading.Thread(target=service.run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert events[-1].reason == "stopped"
