"""`ExLlamaV2Sampler.Settings`: the reference's sampling fields, with the textbook meaning of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import unsupported
from exl2chat.settings import Sampling, option

COLDEST = 0.01  # the reference is greedy below this temperature

# What these fields may be until the steps they control exist here.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "smoothing_factor": (0,),
    "max_temp": (0,),
    "top_a": (0,),
    "tfs": (0, 1),
    "typical": (0, 1),
    "skew": (0,),
    "temperature_last": (False,),
    "mirostat": (False,),
    "token_bias": (None,),
    "cfg_scale": (None,),
    "post_sampling_hooks": ([], None),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}


class ExLlamaV2Sampler:
    """Holds `Settings`, as in the reference."""

    @dataclass(slots=True)
    class Settings:
        """How the next token is drawn. A field that is not supported yet is an error once generation begins.

        Fields that only adjust a step (mirostat_tau, dry_base, xtc_threshold, ...) matter when that step is on.
        """

        token_repetition_penalty: float = 1.025
        token_repetition_range: int = -1
        token_repetition_decay: int = 0
        token_frequency_penalty: float = 0.0
        token_presence_penalty: float = 0.0
        temperature: float = 0.8
        smoothing_factor: float = 0.0
        min_temp: float = 0.0
        max_temp: float = 0.0
        temp_exponent: float = 1.0
        top_k: int = 50
        top_p: float = 0.8
        top_a: float = 0.0
        min_p: float = 0.0
        tfs: float = 0.0
        typical: float = 0.0
        skew: float = 0.0
        temperature_last: bool = False
        mirostat: bool = False
        mirostat_tau: float = 1.5
        mirostat_eta: float = 0.1
        mirostat_mu: float | None = None
        token_bias: Tensor | None = None
        cfg_scale: float | None = None
        post_sampling_hooks: list[Any] = field(default_factory=list)
        dry_allowed_length: int = 2
        dry_base: float = 1.75
        dry_multiplier: float = 0.0
        dry_sequence_breakers: set[int] | None = None
        dry_range: int = 0
        dry_max_ngram: int = 20
        xtc_probability: float = 0.0
        xtc_threshold: float = 0.1
        xtc_ignore_tokens: frozenset[int] | None = None

        @staticmethod
        def greedy(**kwargs: Any) -> "ExLlamaV2Sampler.Settings":
            """Settings that always take the likeliest token."""
            neutral = {"temperature": 1.0, "token_repetition_penalty": 1.0, "top_p": 0.0, "top_k": 1}
            return ExLlamaV2Sampler.Settings(**{**neutral, **kwargs})

        def clone(self) -> "ExLlamaV2Sampler.Settings":
            """A copy."""
            return replace(self)

        def disallow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Sequence[int]) -> None:  # noqa: ARG002
            """Not supported yet: raises UsageError."""
            raise unsupported("ExLlamaV2Sampler.Settings: disallow_tokens")

        def allow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Sequence[int | str]) -> None:  # noqa: ARG002
            """Not supported yet: raises UsageError."""
            raise unsupported("ExLlamaV2Sampler.Settings: allow_tokens")

        def sampling(self, seed: int) -> Sampling:
            """The engine's settings. UsageError naming a field that is not supported, or out of range."""
            for name, neutral in NEUTRAL.items():
                value = getattr(self, name)
                if not any(value is one or value == one for one in neutral):
                    raise unsupported(f"ExLlamaV2Sampler.Settings: {name}")
            greedy = self.temperature < COLDEST or self.top_k == 1
            values = {
                "temperature": 0.0 if greedy else self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p if 0 < self.top_p < 1 else 1.0,
                "min_p": self.min_p,
                "repetition_penalty": self.token_repetition_penalty,
                "frequency_penalty": self.token_frequency_penalty,
                "presence_penalty": self.token_presence_penalty,
                "penalty_range": self.token_repetition_range,
                "penalty_decay": self.token_repetition_decay,
                "seed": seed,
            }
            where = "ExLlamaV2Sampler.Settings"
            checked: dict[str, Any] = {name: option(name).check(value, where) for name, value in values.items()}
            return Sampling(**checked)
