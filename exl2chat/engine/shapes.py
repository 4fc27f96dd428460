"""Models of well-known shapes with random weights, to measure speed without a download."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2chat.engine.transformer import Transformer
from exl2chat.engine.weights import LayerWeights, Weights
from exl2chat.model.arch import find_arch
from exl2chat.model.config import ModelConfig
from exl2chat.model.rope_config import Rope
from exl2chat.ops import select
from exl2chat.ops.kernel_benchmark import BODY_BITS, HEAD_BITS, random_weight
from exl2chat.ops.packed import Norm, Weight, pack, pack_norm
from exl2chat.progress import Progress

CONTEXT = 1 << 17
BLOCK = 1 << 20  # random numbers that are repeated to fill a plain matrix: making all of them takes minutes


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama of `layers` layers; its head has codes of its own, as EXL2 models have even where embeddings are tied."""

    title: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def linears(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """What a layer multiplies: (inputs, outputs of the projections that share them)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (queries, keys, keys)),
            "o": (queries, (self.hidden,)),
            "gate_up": (self.hidden, (self.inner, self.inner)),
            "down": (self.inner, (self.hidden,)),
        }

    def weight_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """About how many bytes its weights take, as `random_model` makes them."""
        matrices = self.layers * sum(k * sum(widths) for k, widths in self.linears.values())
        table = self.hidden * self.vocabulary
        if stays_packed(device, dtype):
            return 2 * table + matrices * 9 // 16 + table * 7 // 8
        return 2 * table + (matrices + table) * dtype.itemsize

    def config(self) -> ModelConfig:
        return ModelConfig(
            arch=find_arch(["LlamaForCausalLM"], self.title),
            name=f"{self.title} with random weights",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-5,
            context=CONTEXT,
            rope=Rope(kind="default", theta=5e5, rotary_dim=self.head_dim),
            windows=(None,) * self.layers,
            attention_scale=self.head_dim**-0.5,
            embedding_scale=1.0,
            tie_embeddings=False,
        )


SHAPES: Mapping[str, Shape] = {
    "llama-8b": Shape("the shape of Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256),
    "llama-1b": Shape("the shape of Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128256),
    "tiny": Shape("a tiny shape", 256, 512, 2, 4, 2, 64, 1024),
}


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype, progress: Progress) -> Transformer:
    """A model of `shape`: in float16 on a GPU packed EXL2 codes of about 4.1 bits and a head of 6, else plain matrices
    as such codes are decoded to. Its activations stay finite; what it writes means nothing."""
    packed = stays_packed(device, dtype)

    def linear(k: int, widths: tuple[int, ...], mix: tuple[tuple[int, float], ...]) -> Weight:
        if packed:
            return random_weight(k, widths, mix, device)
        return pack(random_matrix(sum(widths), k), None, device, dtype)

    def norm() -> Norm:
        return pack_norm(torch.ones(shape.hidden), 1e-5, device)

    layers = []
    for index in range(shape.layers):
        progress("making random weights", index, shape.layers + 1, "layers")
        qkv, o, gate_up, down = (linear(k, widths, BODY_BITS) for k, widths in shape.linears.values())
        layers.append(LayerWeights(qkv, o, gate_up, down, norm(), norm(), None, None, None))
    progress("making random weights", shape.layers, shape.layers + 1, "layers")
    embedding = random_matrix(shape.vocabulary, shape.hidden).to(device)
    head = linear(shape.hidden, (shape.vocabulary,), HEAD_BITS)
    config = shape.config()
    ops = select(device, dtype, config.head_dim, config.hidden_size, config.intermediate_size)
    return Transformer(config, Weights(embedding, tuple(layers), norm(), head), device, dtype, ops)


def stays_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply the codes themselves."""
    return device.type == "cuda" and dtype == torch.float16


def random_matrix(rows: int, columns: int) -> Tensor:
    """Normal numbers float16 [rows, columns] whose products with normal x have about the size of x; they repeat."""
    count = rows * columns
    block: Tensor = (torch.randn(min(count, BLOCK)) * columns**-0.5).half()
    return block.repeat(-(-count // len(block)))[:count].view(rows, columns)
