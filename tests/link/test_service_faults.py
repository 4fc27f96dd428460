"""What fails in the worker without ending it, and what does end it."""

import pytest
import torch

from exl2chat.engine.loader import LoadedModel
from exl2chat.engine.transformer import Transformer
from exl2chat.link import host
from exl2chat.link import protocol as wire
from exl2chat.link.service import Service
from exl2chat.paths import Paths
from tests.link.serving import LOAD, ask, last, serve, text_of


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
