"""From logits to the next token: an ordered table of small steps, then one draw by Gumbel-max.

The noise of the draw is a hash of (seed, absolute position, token id) and of nothing else, so a reply does not depend
on the batch it ran in, on how much of its prompt was in the cache, or on tokens that were drafted.

NumPy rather than torch: on one core the default settings take 0.1 ms for 49,152 logits; torch's argmax, exp, nonzero
and top-k take two to ten times as long as NumPy's.
"""

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.samplers.candidates import Candidates
from exl2chat.engine.samplers.mirostat import Target, mirostat
from exl2chat.engine.samplers.noise import coin, gumbel
from exl2chat.engine.samplers.reshaping import COLDEST, dynamic_temperature, skew, smoothing, temperature
from exl2chat.engine.samplers.single import SingleTokens
from exl2chat.engine.samplers.truncation import min_p, tfs, top_a, top_k, top_n_sigma, top_p, typical_p
from exl2chat.engine.samplers.vocabulary import Vocabulary, breakers, protected
from exl2chat.engine.samplers.xtc import xtc
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling, option_words


class Moment(NamedTuple):
    """What a step may know besides the settings: where the draw is, mirostat's limit, the ids that XTC leaves alone."""

    seed: int
    position: int
    surprise: float
    protected: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """A row: its name in `Sampling.step_order`, whether the settings ask for it, and what it does then."""

    name: str
    active: Callable[[Sampling], bool]
    apply: Callable[[Candidates, Sampling, Moment], Candidates]


def _exclude_top_choices(candidates: Candidates, settings: Sampling, moment: Moment) -> Candidates:
    """XTC with the probability of the settings, for which the position has its own number."""
    if coin(moment.seed, moment.position) >= settings.xtc_probability:
        return candidates
    return xtc(candidates, settings.xtc_threshold, moment.protected)


STEPS = (
    Step("top_n_sigma", lambda s: s.top_n_sigma > 0, lambda c, s, _: top_n_sigma(c, s.top_n_sigma)),
    Step("smoothing", lambda s: s.smoothing_factor > 0,
         lambda c, s, _: smoothing(c, s.smoothing_factor, s.smoothing_curve)),
    Step("temperature", lambda s: s.temperature != 1 and s.max_temperature == 0,
         lambda c, s, _: temperature(c, s.temperature)),
    Step("top_k", lambda s: s.top_k > 0, lambda c, s, _: top_k(c, s.top_k)),
    Step("top_p", lambda s: s.top_p < 1, lambda c, s, _: top_p(c, s.top_p)),
    Step("top_a", lambda s: s.top_a > 0, lambda c, s, _: top_a(c, s.top_a)),
    Step("min_p", lambda s: s.min_p > 0, lambda c, s, _: min_p(c, s.min_p)),
    Step("tfs", lambda s: s.tfs < 1, lambda c, s, _: tfs(c, s.tfs)),
    Step("typical_p", lambda s: s.typical_p < 1, lambda c, s, _: typical_p(c, s.typical_p)),
    Step("mirostat", lambda s: s.mirostat_tau > 0, lambda c, _, m: mirostat(c, m.surprise)),
    Step("dynamic_temperature", lambda s: s.max_temperature > 0,
         lambda c, s, _: dynamic_temperature(c, s.min_temperature, s.max_temperature, s.temperature_exponent)),
    Step("xtc", lambda s: s.xtc_probability > 0, _exclude_top_choices),
    Step("skew", lambda s: s.skew != 0, lambda c, s, _: skew(c, s.skew)),
)  # fmt: skip
BY_NAME = {step.name: step for step in STEPS}


def active_steps(settings: Sampling) -> tuple[Step, ...]:
    """The steps that `settings` ask for, in the order they are to run."""
    named = option_words(settings.step_order)
    usual = [step.name for step in STEPS]
    if settings.temperature_last:
        usual.remove("temperature")
        usual.insert(usual.index("mirostat") + 1, "temperature")
    names = [*named, *(name for name in usual if name not in named)]
    return tuple(step for step in map(BY_NAME.__getitem__, names) if step.active(settings))


def draw(candidates: Candidates, seed: int, position: int) -> int:
    """A token id drawn from softmax(logits): the argmax of logits + Gumbel noise (Gumbel-max; Maddison et al. 2014)."""
    if len(candidates.ids) == 1:
        return int(candidates.ids[0])  # 4 us for a greedy token, 33 with the noise
    return int(candidates.ids[np.argmax(candidates.logits + gumbel(seed, position, candidates.ids))])


class Sampler:
    """Draws the tokens of one reply, and remembers what its settings need to know of the conversation.

    `seed` is that of the settings, or one drawn for this reply. Nothing is kept in the settings: the same settings,
    seed, tokens and logits give the same reply, whatever was generated before.
    """

    def __init__(self, settings: Sampling, tokens: Iterable[int], vocabulary: Vocabulary | None = None) -> None:
        """`tokens`: the prompt, which penalties and DRY look at too. `vocabulary` says which tokens break a passage
        for DRY and are left alone by XTC where the settings do not; without it none are."""
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._settings, self._steps = settings, active_steps(settings)
        self._single = SingleTokens(settings, breakers(settings, vocabulary), tokens)
        self._protected = np.array(sorted(protected(settings, vocabulary)), np.int64)
        self._target = Target(settings.mirostat_tau, settings.mirostat_eta, settings.mirostat_mu)
        self._offered: Candidates | None = None

    @property
    def surprise_limit(self) -> float:
        """Mirostat's limit for the next token. With it as `mirostat_mu`, another sampler goes on from here."""
        return self._target.limit

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        """The token at absolute `position` given its `logits` [V] float32, which are left as they are.

        A token whose logit is minus infinity takes no part: it is as if the vocabulary lacked it. ChatError when the
        logits are not numbers, or the settings allow no token.
        """
        return draw(self.candidates(logits, position), self.seed, position)

    def candidates(self, logits: NDArray[np.float32], position: int) -> Candidates:
        """What `sample` draws from: one token if the settings are greedy."""
        candidates = self._single.apply(logits)
        best = int(np.argmax(candidates.logits))
        if candidates.logits[best] == -np.inf:  # argmax prefers what is no number
            raise ChatError(
                "no token is left to draw: every one is masked, blocked or biased away",
                "block fewer tokens or allow more",
            )
        if not math.isfinite(candidates.logits[best]):
            raise ChatError("the model computed logits that are not numbers", "try --dtype float32")
        if self._settings.temperature <= COLDEST:
            return candidates.keep(np.array([best]))
        if candidates.logits.min() == -np.inf:  # masked by the caller
            candidates = candidates.keep(np.flatnonzero(candidates.logits > -np.inf))
        moment = Moment(self.seed, position, self._target.limit, self._protected)
        for step in self._steps:
            if step.name == "mirostat":
                self._offered = candidates
            candidates = step.apply(candidates, self._settings, moment)
        return candidates

    def observe(self, token: int) -> None:
        """`token` has become part of the sequence."""
        self._single.observe(token)
        if self._offered is not None:
            self._target.observe(self._offered, token)
            self._offered = None
