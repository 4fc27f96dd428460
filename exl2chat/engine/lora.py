"""LoRAs on a device, and a model as they change it. Format: `exl2chat.model.lora`.

A LoRA, like quantisation, is a property of one linear weight: `with_adapters` gives a Transformer of the same weights,
some of them wrapped. Nothing is copied or read, so that every reply may have its own, and the model without any is as
it was. On a GPU a wrapped matrix takes its activations as plain rows, and steps are not recorded as graphs.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2chat.engine.placement import free_bytes
from exl2chat.engine.transformer import Transformer
from exl2chat.engine.weights import read_tensor
from exl2chat.errors import ModelError, UsageError
from exl2chat.model.config import ModelConfig
from exl2chat.model.lora import Lora, Place, Update, open_lora
from exl2chat.model.tensors import TensorInfo
from exl2chat.ops.packed import Weight


@dataclass(frozen=True, slots=True)
class Delta:
    """What is added to outputs [start, start + N) of a matrix: scale * (x A') B', with a [rank, K] and b [N, rank]."""

    a: Tensor
    b: Tensor
    start: int
    scale: float

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """y [T, ...] gets what x [T, K] makes."""
        columns = slice(self.start, self.start + self.b.shape[0])
        y[:, columns] += F.linear(F.linear(x.to(self.a.dtype), self.a).mul_(self.scale), self.b)


@dataclass(frozen=True, slots=True)
class Adapted:
    """A Weight and what is added to it."""

    base: Weight
    deltas: tuple[Delta, ...]

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(delta.nbytes for delta in self.deltas)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for delta in self.deltas:
            delta.add_to(y, x)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA in memory, for models of `config` on `device`: deltas by layer (None: the head) and matrix.

    Two are equal only if they are the same object; `identity` tells them apart in a hash.
    """

    name: str
    config: ModelConfig
    device: torch.device
    deltas: Mapping[tuple[int | None, Place], tuple[Delta, ...]]
    identity: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def nbytes(self) -> int:
        return sum(delta.nbytes for deltas in self.deltas.values() for delta in deltas)


@dataclass(frozen=True, slots=True)
class Scaled:
    """An adapter, and how much of it: 1 as it was trained, 0 nothing."""

    adapter: Adapter
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise UsageError(f"{self.adapter.name}: the scale of a LoRA is a number, not {self.scale}")


def load_adapter(path: Path, model: Transformer) -> Adapter:
    """The LoRA in the folder `path`, for `model`. ModelError where it is damaged, not supported, made for another model
    or does not fit the memory."""
    lora = open_lora(path, model.config)
    dtype = adapter_dtype(model)
    _check_room(lora, dtype, model.device)
    deltas: dict[tuple[int | None, Place], tuple[Delta, ...]] = {}
    for update in lora.updates:
        key = update.layer, update.slot.place
        deltas[key] = (*deltas.get(key, ()), _load(update, dtype, model.device))
    return Adapter(lora.folder.name, model.config, model.device, deltas)


def adapter_dtype(model: Transformer) -> torch.dtype:
    """float32 on the CPU, which multiplies few float16 numbers no faster; elsewhere that of the model."""
    return torch.float32 if model.device.type == "cpu" else model.dtype


def with_adapters(model: Transformer, adapters: Sequence[Scaled]) -> Transformer:
    """`model` with these adapters and no others: the same weights in the same memory. UsageError where an adapter was
    loaded for another model."""
    active = tuple(scaled for scaled in adapters if scaled.scale != 0)
    for adapter in (scaled.adapter for scaled in active):
        if adapter.config != model.config or adapter.device != model.device:
            raise UsageError(f"{adapter.name}: the LoRA was loaded for another model", "load it for this one")
    if active == model.adapters:
        return model

    def adapt(weight: Weight, layer: int | None, place: Place) -> Weight:
        base = weight.base if isinstance(weight, Adapted) else weight
        deltas = tuple(
            replace(delta, scale=delta.scale * scaled.scale)
            for scaled in active
            for delta in scaled.adapter.deltas.get((layer, place), ())
        )
        return Adapted(base, deltas) if deltas else base

    layers = tuple(
        replace(
            layer,
            qkv=adapt(layer.qkv, index, "qkv"),
            o=adapt(layer.o, index, "o"),
            gate_up=adapt(layer.gate_up, index, "gate_up"),
            down=adapt(layer.down, index, "down"),
        )
        for index, layer in enumerate(model.weights.layers)
    )
    weights = replace(model.weights, layers=layers, head=adapt(model.weights.head, None, "head"))
    return replace(model, weights=weights, adapters=active)


def cache_salt(adapters: Sequence[Scaled]) -> bytes:
    """What keys and values depend on beside the tokens, for `pages.PageTable`; b"" without adapters."""
    if not adapters:
        return b""
    parts = (scaled.adapter.identity + struct.pack("<d", scaled.scale) for scaled in adapters)
    return hashlib.sha256(b"".join(parts)).digest()


def _load(update: Update, dtype: torch.dtype, device: torch.device) -> Delta:
    a, b = (_read_finite(info, dtype).to(device) for info in (update.a, update.b))
    return Delta(a, b, update.slot.start, update.scale)


def _read_finite(info: TensorInfo, dtype: torch.dtype) -> Tensor:
    values = read_tensor(info).to(dtype)
    if not values.isfinite().all():
        kind = str(dtype).removeprefix("torch.")
        raise ModelError(f"{info} holds values that are not finite in {kind}", "use another LoRA, or --dtype float32")
    return values


def _check_room(lora: Lora, dtype: torch.dtype, device: torch.device) -> None:
    needed = sum(math.prod(info.shape) for update in lora.updates for info in (update.a, update.b)) * dtype.itemsize
    free = free_bytes(device)
    if free is not None and needed > free:
        raise ModelError(
            f"{lora.folder.path}: the LoRA takes {needed >> 20} MiB, and {free >> 20} MiB are free",
            "use a shorter context (--ctx) or fewer LoRAs",
        )
