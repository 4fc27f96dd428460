"""The table of architectures. A row states only what differs from Llama; every number comes from config.json.

A feature that the tensors show (biases, tied head, q/k norms, fused projections) is not stated here: the reader of the
tensors finds it.
"""

import reprlib
from dataclasses import dataclass
from typing import Literal

from exl2chat.errors import ModelError

Window = Literal["config", "none", "alternating"]


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """How a family of models differs from Llama.

    norm_plus_one: RMSNorm multiplies by 1 + weight. sandwich_norms: a norm before and after attention and MLP.
    activation: of the gate. scale_embedding: embeddings times sqrt(hidden), rounded to the model's dtype. window: which
    layers a sliding window in the config applies to ("alternating": the even ones).
    """

    names: tuple[str, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    scale_embedding: bool = False
    window: Window = "config"


ARCHITECTURES: tuple[ArchSpec, ...] = (
    ArchSpec(("LlamaForCausalLM",), window="none"),
    ArchSpec(("MistralForCausalLM",)),
    ArchSpec(("Qwen2ForCausalLM",)),
    ArchSpec(("Qwen3ForCausalLM",)),
    ArchSpec(
        ("Gemma2ForCausalLM",),
        activation="gelu_tanh", norm_plus_one=True, sandwich_norms=True, scale_embedding=True, window="alternating",
    ),
    ArchSpec(("Phi3ForCausalLM",)),
)  # fmt: skip


def find_arch(names: list[str], where: str) -> ArchSpec:
    """The row for the `architectures` of a config.json; ModelError naming what is supported otherwise."""
    for spec in ARCHITECTURES:
        if set(names) & set(spec.names):
            return spec
    known = ", ".join(name.removesuffix("ForCausalLM") for spec in ARCHITECTURES for name in spec.names)
    raise ModelError(f"{where}: architectures {reprlib.repr(names)} is not supported", f"supported are {known}")
