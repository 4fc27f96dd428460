"""Random models of transformers and ours over the same files, and what they are given."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.progress import silent

TOLERANCE = 1e-4
VOCABULARY, HIDDEN = 160, 48
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 3.0, 5.0, 9.0], "original_max_position_embeddings": 64}  # fmt: skip
# One row per architecture and feature. Heads are 16 wide, which hidden / heads is not; Phi3's config has no head_dim.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 6}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-partial": (
        "Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
}  # fmt: skip


def make_model(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    """A random model of transformers, saved to `folder`. Norms and biases too are random: they start as 1 and 0."""
    head_dim = {} if family == "Phi3" else {"head_dim": 16}
    config: PretrainedConfig = getattr(transformers, family + "Config")(**{**SIZE, **head_dim, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(0.5, 0.3)
            if name.endswith("layers.1.self_attn.k_proj.bias"):
                parameter.zero_()  # readers leave out a bias of zeros, also beside others
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> Transformer:
    return Transformer.load(open_checkpoint(folder), torch.device("cpu"), torch.float32, silent)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def rows(count: int, seed: int = 0, width: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
