"""`ExLlamaV2Sampler.Settings`: the reference's sampling fields, with the textbook meaning of each."""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from exl2chat.engine.sampler import Sampler, draw
from exl2chat.engine.samplers.candidates import Candidates
from exl2chat.errors import UsageError
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import refuse_set
from exl2chat.settings import MAX_BIAS, Sampling

WHERE = "ExLlamaV2Sampler.Settings"
SAMPLE = "ExLlamaV2Sampler.sample"
COLDEST = 0.01  # the reference is greedy below this temperature


class TokenError(UsageError, ValueError):
    """A token to allow or disallow that is no token."""


class ExLlamaV2Sampler:
    """Draws single tokens for a script that has its own loop, and holds `Settings`, as in the reference."""

    @dataclass(slots=True)
    class Settings:
        """How the next token is drawn. A field that is not supported yet is an error once generation begins.

        0 switches a truncation off, and 1 does too where that keeps everything. A dynamic temperature (max_temp above
        min_temp) takes the place of the fixed one. What DRY and mirostat remember is with each reply, not here:
        ngram_trie, ngram_index and ngram_history are only there to be reset. `filters` are those of calls without any.
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
        mirostat_mu: float | Sequence[float] | None = None
        token_bias: Tensor | None = None
        cfg_scale: float | None = None
        post_sampling_hooks: list[Callable[..., Any]] = field(default_factory=list)
        dry_allowed_length: int = 2
        dry_base: float = 1.75
        dry_multiplier: float = 0.0
        dry_sequence_breakers: Collection[int] | None = None
        dry_range: int = 0
        dry_max_ngram: int = 20
        ngram_trie: object = None
        ngram_index: int = 0
        ngram_history: object = None
        xtc_probability: float = 0.0
        xtc_threshold: float = 0.1
        xtc_ignore_tokens: Collection[int] | None = None
        filters: Sequence[Any] | None = None

        @staticmethod
        def greedy(**kwargs: Any) -> "ExLlamaV2Sampler.Settings":
            """Settings that always take the likeliest token."""
            neutral = {"temperature": 1.0, "token_repetition_penalty": 1.0, "top_p": 0.0, "top_k": 1}
            return ExLlamaV2Sampler.Settings(**{**neutral, **kwargs})

        def clone(self) -> "ExLlamaV2Sampler.Settings":
            """A copy that shares nothing that can be changed, but the hooks themselves."""
            names = ("post_sampling_hooks", "dry_sequence_breakers", "xtc_ignore_tokens", "mirostat_mu")
            bias = None if self.token_bias is None else self.token_bias.clone()
            return replace(self, token_bias=bias, **{name: copy(getattr(self, name)) for name in names})

        def greedy_clone(self) -> "ExLlamaV2Sampler.Settings":
            """A copy that takes the likeliest token after the same penalties, DRY and bias: for drafts."""
            return replace(self.clone(), temperature=1.0, top_k=1, top_p=0.0)

        def disallow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Sequence[int]) -> None:
            """Never draw `tokens`. A ValueError for what is no token."""
            self._bias_for(tokenizer)[_ids(tokenizer, tokens)] = -torch.inf

        def allow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Sequence[int | str]) -> None:
            """Draw `tokens` only, given by id or as the vocabulary writes them. A ValueError for what is no token."""
            others = torch.ones(tokenizer.get_vocab_size(), dtype=torch.bool)
            others[_ids(tokenizer, tokens)] = False
            self._bias_for(tokenizer)[: len(others)][others] = -torch.inf

        def _bias_for(self, tokenizer: ExLlamaV2Tokenizer) -> Tensor:
            if self.token_bias is None:
                self.token_bias = torch.zeros(tokenizer.get_vocab_size())
            return self.token_bias

        def sampling(self, seed: int) -> Sampling:
            """The engine's settings. UsageError naming a field that is not supported, or out of range."""
            refuse_set(WHERE, cfg_scale=self.cfg_scale, post_sampling_hooks=self.post_sampling_hooks)
            refuse_set(WHERE, ngram_trie=self.ngram_trie, ngram_index=self.ngram_index)
            refuse_set(WHERE, ngram_history=self.ngram_history)
            return Sampling(
                temperature=0.0 if self.temperature < COLDEST or self.top_k == 1 else self.temperature,
                top_k=self.top_k,
                top_p=_or_one(self.top_p),
                min_p=self.min_p,
                repetition_penalty=self.token_repetition_penalty,
                frequency_penalty=self.token_frequency_penalty,
                presence_penalty=self.token_presence_penalty,
                penalty_range=self.token_repetition_range,
                penalty_decay=self.token_repetition_decay,
                seed=seed,
                top_a=self.top_a,
                tfs=_or_one(self.tfs),
                typical_p=_or_one(self.typical),
                mirostat_tau=self.mirostat_tau if self.mirostat else 0.0,
                mirostat_eta=self.mirostat_eta,
                mirostat_mu=_first(self.mirostat_mu) or None,
                smoothing_factor=self.smoothing_factor,
                min_temperature=self.min_temp,
                max_temperature=self.max_temp if self.max_temp > self.min_temp else 0.0,
                temperature_exponent=self.temp_exponent,
                temperature_last=self.temperature_last,
                skew=self.skew,
                xtc_probability=self.xtc_probability,
                xtc_threshold=self.xtc_threshold,
                xtc_ignore_tokens=_sorted(self.xtc_ignore_tokens),
                dry_multiplier=self.dry_multiplier,
                dry_base=self.dry_base,
                dry_allowed_length=self.dry_allowed_length,
                dry_range=self.dry_range,
                dry_max_length=self.dry_max_ngram,
                dry_breakers=_sorted(self.dry_sequence_breakers),
                **_bias(self.token_bias),
            )

    @staticmethod
    def sample(
        logits: Tensor,
        settings: Settings,
        sequence_ids: Tensor,
        random: float,
        tokenizer: ExLlamaV2Tokenizer,
        prefix_token: Tensor | None = None,
        return_top_tokens: int = 0,
        blocked_tokens: Sequence[int] | None = None,
        filters: Sequence[object] | None = None,
        filter_prefer_eos: bool = False,
        sync: bool = False,  # noqa: ARG004
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, bool]:
        """One token for every row of `logits` [B, 1, V], which are left as they are, after `sequence_ids` [B, n].

        Returns token int64 [B, 1]; with return_top_tokens k the likeliest int64 [B, 1, k] and their probabilities
        [B, 1, k], -1 and 0 where fewer are left; the token's probability [B, 1]; and whether a filter ends the text.
        Probabilities are those of what the settings leave. `random` from [0, 1) takes the place of a seed. Mirostat
        begins anew with each call: set mirostat_mu, or use a generator, which keeps its limit.
        """
        refuse_set(SAMPLE, prefix_token=prefix_token, filters=filters, filter_prefer_eos=filter_prefer_eos)
        rows = logits[:, -1, : tokenizer.get_vocab_size()].float().numpy(force=True).copy()
        rows[:, list(blocked_tokens or ())] = -np.inf
        drawn: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for row, tokens in zip(rows, sequence_ids.tolist(), strict=True):
            seed = int(random * 2**52) + len(drawn)
            sampler = Sampler(settings.sampling(seed), tokens, tokenizer.vocabulary)
            candidates = sampler.candidates(row, len(tokens))
            drawn.append(_described(candidates, draw(candidates, seed, len(tokens)), return_top_tokens))
        token, probability, top_tokens, top_probabilities = (torch.stack(column) for column in zip(*drawn, strict=True))
        if not return_top_tokens:
            return token, None, None, probability, False
        return token, top_tokens, top_probabilities, probability, False

    @staticmethod
    def get_dry_default_sequence_breaker_tokens(tokenizer: ExLlamaV2Tokenizer) -> frozenset[int]:
        """The ids that no passage repeated for DRY contains, unless dry_sequence_breakers says otherwise."""
        return tokenizer.vocabulary.breakers

    @staticmethod
    def get_default_xtc_mask_tokens(tokenizer: ExLlamaV2Tokenizer) -> frozenset[int]:
        """The ids that XTC leaves alone, unless xtc_ignore_tokens says otherwise."""
        return tokenizer.vocabulary.structure


def _described(candidates: Candidates, token: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`token` [1], its probability [1], and the `count` likeliest candidates [1, count] with theirs."""
    probabilities = torch.softmax(torch.from_numpy(candidates.logits), 0)
    ids = torch.from_numpy(candidates.ids)
    best = torch.topk(probabilities, min(count, len(ids)))
    missing = (0, count - len(best.values))
    top_tokens = pad(ids[best.indices], missing, value=-1)[None]
    return torch.tensor([token]), probabilities[ids == token], top_tokens, pad(best.values, missing)[None]


def _ids(tokenizer: ExLlamaV2Tokenizer, tokens: Sequence[int | str]) -> list[int]:
    """The ids of `tokens`; TokenError for what is no token."""
    ids = [tokenizer.single_id(token) if isinstance(token, str) else token for token in tokens]
    for token, token_id in zip(tokens, ids, strict=True):
        if not isinstance(token_id, int) or not 0 <= token_id < tokenizer.get_vocab_size():
            raise TokenError(f"{token!r} is no token of the model", "give ids, or tokens as the vocabulary writes them")
    return cast(list[int], ids)


def _bias(bias: Tensor | None) -> dict[str, Any]:
    """The fields of `Sampling` for a token_bias [V]: what is as low there as a bias can be is banned."""
    if bias is None:
        return {}
    bias = bias.flatten()
    banned = bias <= -MAX_BIAS
    added = (bias != 0) & ~banned
    pairs = zip(added.nonzero().flatten().tolist(), bias[added].tolist(), strict=True)
    few = {"banned_tokens": banned} if banned.count_nonzero() * 2 < len(bias) else {"allowed_tokens": ~banned}
    return {"logit_bias": tuple(pairs), **{name: tuple(of.nonzero().flatten().tolist()) for name, of in few.items()}}


def _or_one(share: float) -> float:
    """A truncation's share of the probability; where the reference says 0, everything."""
    return share or 1.0


def _first(value: float | Sequence[float] | None) -> float | None:
    """The reference keeps a list with one number per row."""
    return next(iter(value), None) if isinstance(value, Sequence) else value


def _sorted(ids: Collection[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(sorted(ids))
