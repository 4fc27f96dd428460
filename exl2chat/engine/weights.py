"""From descriptions on disk to tensors on a device, packed the way the device multiplies them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exl2chat.engine.nibbles import pack_gptq
from exl2chat.engine.tiling import tile
from exl2chat.model.checkpoint import Checkpoint, Layer
from exl2chat.model.config import ModelConfig
from exl2chat.model.dequant import dequantize
from exl2chat.model.quant import Linear
from exl2chat.model.tensors import TensorInfo, read_array
from exl2chat.ops.packed import Norm, Weight, pack, pack_norm
from exl2chat.progress import Progress


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. qkv: [hidden] to (H + 2 G) * D, queries first; gate_up: [hidden] to 2 * inner, gate first.

    head_norm: of queries and keys, scale [H + G, D]; the two `_post` norms are there with sandwich norms.
    """

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    attention_norm: Norm
    mlp_norm: Norm
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    head_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Weights:
    """A model on a device. embedding [V, hidden] as stored; the head's rows are cut to the vocabulary."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Weight

    @property
    def following(self) -> tuple[tuple[Norm, Weight], ...]:
        """The norm after each layer and the matrix behind it: those of the next layer's attention, and of the head."""
        return (*((layer.attention_norm, layer.qkv) for layer in self.layers[1:]), (self.final_norm, self.head))

    @property
    def read_bytes(self) -> int:
        """Bytes of the matrices, all of which every token reads."""
        linears = [weight for layer in self.layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return self.head.nbytes + sum(weight.nbytes for weight in linears)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices and the embedding."""
        return self.embedding.nbytes + self.read_bytes


def load_weights(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress) -> Weights:
    """Read, decode and pack every tensor; `progress` after each layer."""
    loader = _Loader(checkpoint.config, device, dtype)
    count = len(checkpoint.layers) + 1
    layers = []
    for index, layer in enumerate(checkpoint.layers):
        progress("loading", index, count, "layers")
        layers.append(loader.layer(layer))
    progress("loading", count - 1, count, "layers")
    embedding = read_tensor(checkpoint.embedding).to(device)
    head = loader.head(checkpoint.head)
    progress("loading", count, count, "layers")
    return Weights(embedding, tuple(layers), loader.norm(checkpoint.final_norm), head)


def read_tensor(info: TensorInfo) -> Tensor:
    """The values of a float tensor on disk in its own dtype."""
    values = torch.from_numpy(read_array(info))
    return values.view(torch.bfloat16) if info.dtype == "BF16" else values


def read_matrix(linear: Linear) -> Tensor:
    """The weight of any format as floats [out_features, in_features]: a plain one in its own dtype, others in the
    float16 that their formats decode to, exactly."""
    if linear.kind == "plain":
        return read_tensor(linear.tensors["weight"])
    return torch.from_numpy(np.ascontiguousarray(dequantize(linear).T))


@dataclass(frozen=True, slots=True)
class _Loader:
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def has_kernels(self) -> bool:
        """Whether quantised weights stay packed: the kernels multiply float16 on CUDA devices."""
        return self.device.type == "cuda" and self.dtype == torch.float16

    def layer(self, layer: Layer) -> LayerWeights:
        norms = layer.norms
        return LayerWeights(
            qkv=self.linear(layer.qkv),
            o=self.linear((layer.o,)),
            gate_up=self.linear(layer.gate_up),
            down=self.linear((layer.down,)),
            attention_norm=self.norm(norms["attention"]),
            mlp_norm=self.norm(norms["mlp"]),
            attention_post_norm=self.norm(norms["attention_post"]) if "attention_post" in norms else None,
            mlp_post_norm=self.norm(norms["mlp_post"]) if "mlp_post" in norms else None,
            head_norm=self.head_norm(norms) if "q" in norms else None,
        )

    def linear(self, parts: Sequence[Linear]) -> Weight:
        """Projections of one input as one matrix, one below the other."""
        if self.has_kernels and (tiled := tile(parts, self.device)) is not None:
            return tiled
        bias = join_bias(parts)
        if self.dtype == torch.bfloat16 and self.device.type == "cpu":
            packed = pack_gptq(parts, bias)
            if packed is not None:
                return packed
        matrices = [read_matrix(part) for part in parts]
        return pack(torch.cat(matrices) if len(parts) > 1 else matrices[0], bias, self.device, self.dtype)

    def head(self, head: Linear) -> Weight:
        """The head, cut to the vocabulary."""
        count = self.config.vocab_size
        if self.has_kernels and (tiled := tile((head,), self.device, count)) is not None:
            return tiled
        bias = join_bias((head,))
        return pack(read_matrix(head)[:count], None if bias is None else bias[:count], self.device, self.dtype)

    def norm(self, info: TensorInfo) -> Norm:
        return self.pack_norm(read_tensor(info).float())

    def head_norm(self, norms: Mapping[str, TensorInfo]) -> Norm:
        """The norms of queries and keys as one, over the H + G heads that lie side by side in qkv."""
        config, size = self.config, self.config.head_dim
        q, k = (read_tensor(norms[role]).float().view(-1, size) for role in ("q", "k"))
        return self.pack_norm(torch.cat((q.expand(config.num_heads, size), k.expand(config.num_kv_heads, size))))

    def pack_norm(self, weight: Tensor) -> Norm:
        shift = 1.0 if self.config.arch.norm_plus_one else 0.0
        return pack_norm(weight + shift, self.config.norm_eps, self.device)


def join_bias(parts: Sequence[Linear]) -> Tensor | None:
    """The biases of the parts as one float32 vector, zeros where a part has none; None where none has."""
    if not any("bias" in part.tensors for part in parts):
        return None
    biases = [
        read_tensor(part.tensors["bias"]).float() if "bias" in part.tensors else torch.zeros(part.out_features)
        for part in parts
    ]
    return torch.cat(biases)
