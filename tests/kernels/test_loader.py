"""The loader of kernels where there is no GPU: what it compiles, in what order, and what it says when that fails."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from exl2chat import kernels
from exl2chat.errors import ModelError

CUDA = torch.device("cuda")


def test_a_kernel_is_one_object_per_variant() -> None:
    first = kernels.load("gate.cu", "silu_half", CUDA)
    assert kernels.load("gate.cu", "silu_half", CUDA) is first
    assert kernels.load("gate.cu", "silu_float", CUDA) is not first
    assert kernels.load("norm.cu", "norm_only", CUDA, UNITS=1) is not kernels.load(
        "norm.cu", "norm_only", CUDA, UNITS=2
    )


def test_a_rehearsal_notes_launches_and_runs_none() -> None:
    kernel = kernels.load("gate.cu", "silu_half", CUDA)
    with kernels.rehearsal() as outer:
        kernel.launch((1, 1), 32, 0)
        with kernels.rehearsal() as inner:
            pass
    assert (outer, inner) == ({kernel}, set())


def test_files_are_compiled_once_each_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[Any, ...]] = []
    ready: list[str] = []
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(kernels, "_module", lambda *file: compiled.append(file))
    monkeypatch.setattr(kernels.Kernel, "compile", lambda kernel: ready.append(kernel.function))

    def work() -> None:
        for _ in range(2):
            for function in ("silu_half", "silu_float"):
                kernels.load("gate.cu", function, CUDA).launch((1, 1), 32, 0)
            kernels.load("norm.cu", "norm_only", CUDA, UNITS=4).launch((1, 1), 32, 0)

    kernels.compile_for(work, lambda stage, done=0, total=0, _unit="": told.append((stage, done, total)))
    assert sorted(compiled) == [("gate.cu", 0, ()), ("norm.cu", 0, (("UNITS", 4),))]
    assert sorted(ready) == ["norm_only", "silu_float", "silu_half"]
    assert told == [("compiling kernels", done, 2) for done in (0, 1, 2)]


def test_a_stop_ends_the_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def stop(_stage: str, done: int = 0, _total: int = 0, _unit: str = "") -> None:
        if done:
            raise Stopped

    monkeypatch.setattr(kernels, "_module", lambda *_: None)
    with pytest.raises(Stopped):
        kernels.compile_for(lambda: kernels.load("gate.cu", "silu_half", CUDA).launch((1, 1), 32, 0), stop)


def test_work_without_kernels_compiles_nothing_and_says_nothing() -> None:
    def tell(*_: object) -> None:
        raise AssertionError

    kernels.compile_for(lambda: None, tell)


class CompileException(Exception):
    """As CuPy's: the compiler's whole log."""


class Device:
    def __init__(self, _index: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def fake_cupy(monkeypatch: pytest.MonkeyPatch, log: str) -> None:
    def module(**_: object) -> None:
        raise CompileException(log)

    compiler = SimpleNamespace(CompileException=CompileException)
    fake = SimpleNamespace(cuda=SimpleNamespace(Device=Device, compiler=compiler), RawModule=module)
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))


def test_a_kernel_that_does_not_compile_is_named_with_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "norm.cu(3): warning: unused\nnorm.cu(7): catastrophic error: cannot open cuda_fp16.h\n1 error detected"
    fake_cupy(monkeypatch, log)
    with pytest.raises(
        ModelError, match=r"kernel norm\.cu UNITS=3 does not compile: norm\.cu\(7\).*cuda_fp16\.h"
    ) as caught:
        kernels._module("norm.cu", 0, (("UNITS", 3),))
    assert "cuda13" in caught.value.remedy


def test_without_cupy_the_remedy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="CuPy") as caught:
        kernels._module("norm.cu", 0, (("UNITS", 5),))
    assert "pip install" in caught.value.remedy


def test_launching_without_a_compiler_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="CuPy"):
        kernels.load("gate.cu", "nothing", CUDA, NONE=1).compile()


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, MemoryError),
        (driver.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, MemoryError),
        (driver.CUresult.CUDA_ERROR_INVALID_VALUE, RuntimeError),
    ],
)
def test_a_launch_that_fails_names_the_kernel_and_tells_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, status: driver.CUresult, fault: type[Exception]
) -> None:
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: (status,))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0, raising=False)
    monkeypatch.setattr(kernels.Kernel, "compile", lambda _: SimpleNamespace(handle=0, overlaps=False))
    with pytest.raises(fault, match=rf"silu_half.*{status.name}"):
        kernels.load("gate.cu", "silu_half", CUDA).launch((1, 1), 32, 0)
