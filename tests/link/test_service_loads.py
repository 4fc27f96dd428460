"""Loads as the worker does them: stages, stops, refusals, memory."""

import json
import shutil
import weakref
from pathlib import Path

import msgspec
import pytest
import torch

from exl2chat.engine import placement
from exl2chat.errors import ModelError
from exl2chat.link import host
from exl2chat.link import protocol as wire
from exl2chat.model.checkpoint import open_checkpoint
from tests.link.serving import LOAD, MODEL, ask, last, serve

ROOM = 16 << 20


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    other = shutil.copytree(MODEL, tmp_path / "other")
    config = json.loads((other / "tokenizer.json").read_bytes())
    vocabulary = config["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(config), "utf-8")
    failed = serve(tmp_path, msgspec.structs.replace(LOAD, draft_model=str(other)))[-1]
    assert "the draft model other has another vocabulary" in failed.message
    assert failed.status == 2


def test_a_draft_model_that_does_not_pay_is_left_out_and_that_is_said(tmp_path):
    load = msgspec.structs.replace(LOAD, dtype="bfloat16", draft_model=MODEL)
    ready, asked = (serve(tmp_path, msgspec.structs.replace(load, speculate=kind))[-1] for kind in ("auto", "draft"))
    assert "the draft model is left out" in ready.note
    assert asked.note == ""


def test_to_speculate_with_a_draft_model_takes_one(tmp_path):
    failed = serve(tmp_path, msgspec.structs.replace(LOAD, speculate="draft"))[-1]
    assert "--draft-model" in failed.remedy


def test_a_load_reports_its_stages_and_says_what_was_loaded(tmp_path):
    *progress, ready = serve(tmp_path, LOAD)
    assert all(isinstance(event, wire.Loading) for event in progress)
    assert len({event.stage for event in progress}) >= 2
    info = ready.model
    assert (info.name, info.path) == ("llama-6.0bpw-exl2", MODEL)
    assert (info.architecture, info.context, info.device, info.dtype) == ("LlamaForCausalLM", 512, "cpu", "float32")
    assert info.quantization.startswith("EXL2")
    assert info.weight_bytes > 0
    assert info.cache_bytes > 0
    assert ready.seconds > 0


def test_the_model_in_the_current_folder_is_called_after_it(tmp_path, monkeypatch):
    monkeypatch.chdir(MODEL)
    assert serve(tmp_path, msgspec.structs.replace(LOAD, model="."))[-1].model.name == "llama-6.0bpw-exl2"


def test_a_stop_of_the_load_ends_it_and_what_waits_for_it(tmp_path):
    def react(event):
        return wire.Stop("") if isinstance(event, wire.Loading) else None

    events = serve(tmp_path, LOAD, ask(), react=react)
    assert not [event for event in events if isinstance(event, wire.Ready)]
    stopped, refused = [event for event in events if isinstance(event, wire.Failed)]
    assert (stopped.id, refused.id, refused.status) == ("", "a", 3)


@pytest.mark.parametrize("weights", [False, True])
def test_a_stop_leaves_the_model_there_was_until_it_is_given_up(tmp_path, weights):
    ready = []

    def react(event):
        ready.extend([event] if isinstance(event, wire.Ready) else [])
        reached = ready and isinstance(event, wire.Loading) and ("weights" in event.stage) == weights
        return wire.Stop("") if reached else None

    events = serve(tmp_path, LOAD, LOAD, ask(), react=react, spare=0 if weights else 1)
    said = [event for event in events if not isinstance(event, wire.Loading | wire.Prefill | wire.Chunk)]
    first, failed, *rest = said
    if weights:
        assert "no model is loaded" in failed.message
        assert [(event.id, event.status) for event in rest] == [("a", ModelError.status)]
    else:
        again, finished = rest
        assert (again.model, again.seconds) == (first.model, 0.0)
        assert (failed.message, finished.reason) == ("the load was stopped", "max_tokens")


@pytest.mark.parametrize(
    ("load", "status", "named"),
    [
        (wire.Load("/no/such/folder"), 3, "/no/such/folder"),
        (wire.Load(MODEL, context=1 << 20), 2, "--ctx"),
        (wire.Load(str(Path(MODEL).parent)), 3, "config.json"),
    ],
)
def test_a_load_that_cannot_work_says_why_and_leaves_the_model_there_was(tmp_path, load, status, named):
    events = serve(tmp_path, LOAD, load)
    ready, failed, ready_again = [event for event in events if not isinstance(event, wire.Loading)]
    assert (failed.id, failed.status) == ("", status)
    assert named in failed.message
    assert (ready_again.model, ready_again.seconds) == (ready.model, 0.0)
    assert last(serve(tmp_path, LOAD, load, ask(), spare=1)).reason == "max_tokens"


def test_a_first_load_that_fails_leaves_no_model(tmp_path):
    failed, refused = serve(tmp_path, wire.Load("/no/such/folder"), ask())
    assert (failed.id, failed.status) == ("", 3)
    assert (refused.id, refused.status) == ("a", 3)


def test_a_model_that_would_fit_only_without_the_old_one_loads_and_the_two_never_meet(tmp_path, monkeypatch):
    held, load = [], host.HostPlan.load

    def watched(plan, progress):
        assert not any(old() for old in held)
        new = load(plan, progress)
        held.append(weakref.ref(new))
        return new

    def free(_device):
        """Memory for one model of this kind and a half."""
        return ROOM - sum(old.info.weight_bytes + old.info.cache_bytes for ref in held if (old := ref()))

    monkeypatch.setattr(host.HostPlan, "load", watched)
    monkeypatch.setattr(placement, "free_bytes", free)
    events = serve(tmp_path, LOAD, LOAD)
    assert [type(event) for event in events if not isinstance(event, wire.Loading)] == [wire.Ready, wire.Ready]


def test_a_context_that_had_to_shrink_is_told(tmp_path, monkeypatch):
    ready = serve(tmp_path, msgspec.structs.replace(LOAD, context=None))[-1]
    assert (ready.note, ready.model.context) == ("", 2048)
    beside = ready.model.cache_bytes // 2
    checkpoint = open_checkpoint(Path(MODEL))
    cpu = torch.device("cpu")
    weights = placement.candidate(checkpoint, cpu, torch.float32).weights
    fixed = weights + placement.workspace_bytes(checkpoint.config, cpu)
    monkeypatch.setattr(placement, "free_bytes", lambda _: fixed + beside)
    ready = serve(tmp_path, msgspec.structs.replace(LOAD, context=None))[-1]
    assert ready.model.context == 1024
    assert "1024 tokens" in ready.note


def test_a_load_tells_the_memory_that_it_takes(tmp_path):
    stages = {event.stage for event in serve(tmp_path, LOAD) if isinstance(event, wire.Loading)}
    assert any("MiB (" in stage and "weights" in stage and "cache" in stage for stage in stages)


def test_progress_is_throttled_within_a_stage(tmp_path, monkeypatch):
    def load(_plan, progress):
        for done in range(100_000):
            progress("counting", done, 100_000)
        progress("counting", 100_000, 100_000)
        raise MemoryError

    monkeypatch.setattr(host.HostPlan, "load", load)
    counted = [
        event for event in serve(tmp_path, LOAD) if isinstance(event, wire.Loading) and event.stage == "counting"
    ]
    assert len(counted) < 100
    assert (counted[0].done, counted[-1].done) == (0, 100_000)
