"""What the worker does, with a real tiny model: everything but the pipe."""

import json
import re
import shutil
import threading
import weakref
from pathlib import Path

import msgspec
import pytest
import torch

from exl2chat.engine import placement
from exl2chat.engine.loader import LoadedModel
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
from tests.model.lora_files import make_lora
from tests.model.tokenizer_files import write_tokenizer

MODEL = str(Path(__file__).parent.parent / "data" / "golden" / "llama-6.0bpw-exl2")
LOAD = wire.Load(MODEL, dtype="float32", context=512)
LAST = (wire.Ready, wire.Failed, wire.Finished)


ROOM = 16 << 20


def ask(id="a", text="hello there", **fields):
    return wire.Generate(
        id, (wire.Turn("user", text),), **{"sampling": Sampling(temperature=0), "max_tokens": 8, **fields}
    )


def nothing(_event):
    return None


def serve(tmp_path, *requests, react=nothing, spare=0):
    """Everything a service says to `requests`; where `react` turns an event into a request, that is submitted too.

    It ends with the answer to the last of them; `spare` answers come beside those.
    """
    events, open_requests = [], len(requests) + spare

    def emit(event):
        nonlocal open_requests
        events.append(event)
        open_requests -= isinstance(event, LAST)
        if further := react(event):
            service.submit(further)
        if not open_requests:
            service.submit(wire.Shutdown())

    service = Service(Paths.default(tmp_path), emit)
    for request in requests:
        service.submit(request)
    service.run()
    return events


def text_of(events, id="a"):
    return "".join(event.text for event in events if isinstance(event, wire.Chunk) and event.id == id)


def last(events, id="a"):
    return next(event for event in events if isinstance(event, wire.Finished | wire.Failed) and event.id == id)


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


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    other = shutil.copytree(MODEL, tmp_path / "other")
    config = json.loads((other / "tokenizer.json").read_bytes())
    vocabulary = config["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(config), "utf-8")
    failed = serve(tmp_path, msgspec.structs.replace(LOAD, draft_model=str(other)))[-1]
    assert "the draft model other has another vocabulary" in failed.message
    assert failed.status == 2


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


def test_a_reply_to_nothing_is_refused_and_the_model_stays(tmp_path):
    events = serve(tmp_path, LOAD, wire.Generate("a", ()), ask("b"))
    assert (last(events).message, last(events).status) == ("there is no message to answer", 2)
    assert last(events, "b").reason == "max_tokens"


class Panic(BaseException):
    """As pyo3 raises it for a panic in a Rust library: no Exception."""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Panic("index out of bounds\n0: frame"), "Panic: index out of bounds"),
        (RuntimeError("mat1 and mat2 cannot be multiplied"), "RuntimeError: mat1"),
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), "out of memory"),
    ],
)
def test_no_defect_of_a_library_ends_the_service(tmp_path, monkeypatch, fault, said):
    def broken(*_):
        raise fault

    monkeypatch.setattr(host.HostPlan, "load", broken)
    failed, refused = (event for event in serve(tmp_path, LOAD, ask()) if isinstance(event, wire.Failed))
    assert said in failed.message
    assert "\n" not in failed.message
    assert failed.remedy
    assert refused.id == "a"


@pytest.mark.parametrize(
    "fault",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        MemoryError("kernel gemv: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA driver error: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    ],
    ids=lambda fault: str(fault)[:20],
)
@pytest.mark.parametrize("at", [0, 3])
def test_a_reply_without_memory_says_what_to_change_and_the_next_one_works(tmp_path, monkeypatch, fault, at):
    whole = serve(tmp_path, LOAD, ask())
    forward, calls = Transformer.forward, []

    def failing(model, *args, **options):
        calls.append(args)
        if len(calls) == at + 1:
            raise fault
        return forward(model, *args, **options)

    monkeypatch.setattr(Transformer, "forward", failing)
    events = serve(tmp_path, LOAD, ask(), ask("b"))
    assert (last(events).message, last(events).status) == ("out of memory", 1)
    assert "--ctx, now 512" in last(events).remedy
    assert text_of(events, "b") == text_of(whole) != ""


def test_a_gpu_that_answers_no_more_ends_the_process_once_the_reply_is_told(tmp_path, monkeypatch):
    """A CUDA error leaves a context of no use: whoever supervises the process starts another."""

    def broken(*_args, **_options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    events = []
    service = Service(Paths.default(tmp_path), events.append)
    monkeypatch.setattr(Transformer, "forward", broken)
    monkeypatch.setattr(LoadedModel, "recover", broken)
    service.submit(LOAD)
    service.submit(ask())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        service.run()
    assert "illegal memory access" in last(events).message


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


# The form of a reply

SCHEMA = '{"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
OBJECT = SCHEMA.replace("{", '{"type": "object", "x-guidance": {"whitespace_flexible": false}, ', 1)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (wire.Form("json", OBJECT), r'\{"ok":(true|false)\}'),
        (wire.Form("regex", "[ab]{4}|[cd]{3}"), "[ab]{4}|[cd]{3}"),
        (wire.Form("grammar", 'start: "yes" | "no"'), "yes|no"),
        (wire.Form("grammar", 'root ::= "yes" | "no"'), "yes|no"),
    ],
)
def test_a_reply_has_the_form_that_was_asked_for_and_the_next_one_is_free(tmp_path, form, pattern):
    events = serve(tmp_path, LOAD, ask(form=form, max_tokens=40), ask("b", max_tokens=12))
    assert last(events).reason == "eos"
    assert re.fullmatch(pattern, text_of(events))
    assert text_of(events, "b") == text_of(serve(tmp_path, LOAD, ask("b", max_tokens=12)), "b")


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        (
            wire.Form("json", '{"properties": {"a": {"not": {}}}}', "s.json"),
            r"s\.json: JSON schema, at /properties/a",
        ),
        (wire.Form("json", "{"), "JSON schema, line 1, column 2"),
        (wire.Form("regex", "a(?=b)"), "regular expression"),
        (wire.Form("grammar", "start: nothing", "g.lark"), r"g\.lark: grammar"),
        (wire.Form("grammar", "root ::= ("), "GBNF grammar"),
    ],
)
def test_a_form_that_cannot_be_followed_is_an_error_and_no_reply(tmp_path, form, complaint):
    events = serve(tmp_path, LOAD, ask(form=form), ask("b"))
    assert last(events).status == 2
    assert re.match(complaint, last(events).message)
    assert text_of(events) == ""
    assert isinstance(last(events, "b"), wire.Finished)


def test_a_reply_that_has_begun_gets_no_form(tmp_path):
    turns = (wire.Turn("user", "hello"), wire.Turn("assistant", "{"))
    events = serve(tmp_path, LOAD, wire.Generate("a", turns, form=wire.Form("json", "{}")))
    assert "cannot be given a form" in last(events).message
