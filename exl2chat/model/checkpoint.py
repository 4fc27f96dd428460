"""A model folder as one checked description: each tensor the engine will use, found and measured by the config."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exl2chat.errors import ModelError
from exl2chat.model.config import ModelConfig, read_config
from exl2chat.model.folder import ModelFolder, open_folder
from exl2chat.model.quant import Linear, expect, expect_finite, find_linear
from exl2chat.model.tensors import FLOATS, TensorInfo, read_tensor_index

# Where the text model's tensors start: alone, or within a multimodal checkpoint of either generation.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
PLAIN_NAMES: Mapping[str, str] = {"F16": "FP16", "BF16": "BF16", "F32": "FP32"}
PRE_NORMS: Mapping[str, str] = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
SANDWICH_NORMS: Mapping[str, str] = {
    "attention": "input_layernorm", "attention_post": "post_attention_layernorm",
    "mlp": "pre_feedforward_layernorm", "mlp_post": "post_feedforward_layernorm",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `qkv` is (q, k, v) or the fused one, `gate_up` (gate, up) or the fused one.

    norms: "attention" and "mlp" [hidden]; with sandwich norms "attention_post" and "mlp_post" too; where the model has
    them "q" and "k", [D] for every head alike, or one per head, [H, D] or [H * D].
    """

    qkv: tuple[Linear, ...]
    o: Linear
    gate_up: tuple[Linear, ...]
    down: Linear
    norms: Mapping[str, TensorInfo]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.qkv, self.o, *self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. `embedding` is float [vocab, hidden].

    `head.out_features` may exceed the vocabulary (EXL2 pads to 32): the logits beyond mean nothing. With tied
    embeddings and no head of its own, `head` is a plain weight over `embedding`.
    """

    folder: ModelFolder
    config: ModelConfig
    embedding: TensorInfo
    layers: tuple[Layer, ...]
    final_norm: TensorInfo
    head: Linear

    @property
    def weight_bytes(self) -> int:
        """Bytes on disk of all tensors used, a tied embedding once."""
        used = {self.embedding, self.final_norm, *self.head.tensors.values()}
        for layer in self.layers:
            used.update(layer.norms.values())
            for linear in layer.linears:
                used.update(linear.tensors.values())
        return sum(info.nbytes for info in used)

    @property
    def quantization(self) -> str:
        """The format of the layers in a few words: "EXL2 4.16 bpw", "GPTQ 4-bit", "BF16", or several with " + "."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        parts = []
        exl2 = [linear for linear in linears if linear.kind == "exl2"]
        if exl2:
            weights = sum(linear.in_features * linear.out_features for linear in exl2)
            parts.append(f"EXL2 {8 * sum(linear.weight_bytes for linear in exl2) / weights:.2f} bpw")
        widths = sorted({linear.bits for linear in linears if linear.kind == "gptq"})
        if widths:
            parts.append(f"GPTQ {'/'.join(map(str, widths))}-bit")
        parts += sorted({PLAIN_NAMES[linear.tensors["weight"].dtype] for linear in linears if linear.kind == "plain"})
        return " + ".join(parts)


def open_checkpoint(path: Path) -> Checkpoint:
    """The model in the folder `path`, checked throughout. ModelError in one line for anything missing or wrong."""
    folder = open_folder(path)
    config = read_config(folder)
    finder = _Finder(folder, config, read_tensor_index(folder))
    return Checkpoint(
        folder,
        config,
        finder.embedding(),
        tuple(finder.layer(f"{finder.prefix}layers.{index}.") for index in range(config.num_layers)),
        finder.norm(f"{finder.prefix}norm"),
        finder.head(),
    )


class _Finder:
    """Looks up the tensors of one model by the names that transformers gives them."""

    def __init__(self, folder: ModelFolder, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), PREFIXES[0])
        layers, head_norms = f"{self.prefix}layers.", ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        self.has_head_norms = any(name.startswith(layers) and name.endswith(head_norms) for name in tensors)

    def missing(self, name: str) -> ModelError:
        return ModelError(f"{self.folder.path}: no file holds tensor {name}", "download the complete model again")

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise self.missing(name)
        return self.tensors[name]

    def embedding(self) -> TensorInfo:
        info = self.tensor(f"{self.prefix}embed_tokens.weight")
        expect(info, FLOATS, (self.config.vocab_size, self.config.hidden_size))
        return info

    def norm(self, key: str) -> TensorInfo:
        info = self.tensor(f"{key}.weight")
        expect(info, FLOATS, (self.config.hidden_size,))
        expect_finite(info)
        return info

    def head_norm(self, key: str, heads: int) -> TensorInfo:
        """The norm of queries or keys: [D], or one per head as [H, D] or [H * D]."""
        info, dim = self.tensor(f"{key}.weight"), self.config.head_dim
        shape = info.shape if info.shape in ((heads, dim), (heads * dim,)) else (dim,)
        expect(info, FLOATS, shape)
        expect_finite(info)
        return info

    def linear(self, key: str, in_features: int, out_features: int) -> Linear:
        found = find_linear(self.tensors, key, in_features, out_features, self.config.quant)
        if found is None:
            raise self.missing(f"{key}.q_weight, .qweight or .weight")
        return found

    def layer(self, prefix: str) -> Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return Layer(
            self.projections(attention, "qkv_proj", {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}),
            self.linear(f"{attention}o_proj", width, hidden),
            self.projections(mlp, "gate_up_proj", {"gate_proj": inner, "up_proj": inner}),
            self.linear(f"{mlp}down_proj", inner, hidden),
            self.norms(prefix),
        )

    def projections(self, prefix: str, fused: str, parts: Mapping[str, int]) -> tuple[Linear, ...]:
        """Projections of the hidden state that a checkpoint may hold as one or one by one."""
        hidden = self.config.hidden_size
        whole = find_linear(self.tensors, prefix + fused, hidden, sum(parts.values()), self.config.quant)
        if whole is not None:
            return (whole,)
        return tuple(self.linear(prefix + name, hidden, width) for name, width in parts.items())

    def norms(self, prefix: str) -> Mapping[str, TensorInfo]:
        names = SANDWICH_NORMS if self.config.arch.sandwich_norms else PRE_NORMS
        norms = {role: self.norm(prefix + name) for role, name in names.items()}
        if self.has_head_norms:
            norms["q"] = self.head_norm(f"{prefix}self_attn.q_norm", self.config.num_heads)
            norms["k"] = self.head_norm(f"{prefix}self_attn.k_norm", self.config.num_kv_heads)
        return norms

    def head(self) -> Linear:
        """lm_head beside the text model, else the embedding if config.json does not say that they differ."""
        config = self.config
        key = "language_model.lm_head" if self.prefix.startswith("language_model.") else "lm_head"
        found = find_linear(self.tensors, key, config.hidden_size, config.vocab_size, self.config.quant, padded=True)
        if found is None and config.tie_embeddings:
            embedding = self.prefix + "embed_tokens"
            found = find_linear(self.tensors, embedding, config.hidden_size, config.vocab_size, self.config.quant)
        if found is None:
            raise self.missing(f"{key}.q_weight, .qweight or .weight")
        return found
