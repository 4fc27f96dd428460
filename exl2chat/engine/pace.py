"""How many tokens it pays to draft, by what drafts have cost and brought so far."""

from collections.abc import Sequence
from statistics import fmean as mean

DECAY = 0.9  # of what older rounds say of the acceptance
WEIGHT = 0.25  # of a new time beside the mean of the older ones
TRIALS = 0.01  # of the time may go into rounds with one draft that do not pay, to see whether they do by now
REFRESH = 128  # a step without drafts for so many with some; then what the next larger number costs is seen again


class Pace:
    """Chooses the number of drafts that promises most tokens a second: (1 + p + ... + p^k) tokens in cost[k] steps,
    where p is how often a draft is right if those before it were.

    Costs are measured, a length at a time: a number that was never tried is taken to cost in proportion to a smaller
    one, and is at most twice the largest tried. The first time of a number does not count: it may be that of a wait for
    memory, for kernels or for a recording. Times decide how much is drafted and never which token is drawn.
    """

    def __init__(self, most: int) -> None:
        """At most `most` drafts, at least 1."""
        self._most = most
        self._right, self._wrong = 2.0, 1.0
        self._costs: dict[int, float] = {}
        self._since_draft = self._since_step = self._last = 0
        self._warm: set[int] = set()  # lengths that were tried
        self._best, self._pause = self._fastest()
        self.step: float | None = None  # seconds of a step without drafts

    def length(self) -> int:
        """How many tokens to draft now; 0: none."""
        if self.step is None or self._since_step >= REFRESH:
            return 0
        return self._best or int(self._since_draft >= self._pause)

    def stepped(self, seconds: float) -> None:
        """A step without drafts took so long."""
        if self._since_step >= REFRESH:
            self._costs.pop(min((n for n in self._costs if n > self._last), default=0), None)
            self._best, self._pause = self._fastest()
        self._since_draft += 1
        self._since_step = 0
        if 0 not in self._warm:
            self._warm.add(0)
        elif self.step is None:
            self.step = seconds
        else:  # less, if whoever reads the reply made a pause
            self.step += WEIGHT * (min(seconds, 2 * self.step) - self.step)

    def drafted(self, count: int, accepted: Sequence[int], seconds: float) -> None:
        """A round took so long with drafting. Of up to `count` drafts, at least 1, so many were right in each
        sequence."""
        self._since_draft, self._last = 0, count
        self._since_step += 1
        self._right = DECAY * self._right + mean(accepted)
        self._wrong = DECAY * self._wrong + mean(right < count for right in accepted)
        if count not in self._warm:
            self._warm.add(count)
        elif self.step:
            cost = min(seconds / self.step, 1 + 2 * count)  # as drafts by a model as large would; the rest was a pause
            self._costs[count] = self._costs.get(count, cost) + WEIGHT * (cost - self._costs.get(count, cost))
        self._best, self._pause = self._fastest()

    def _fastest(self) -> tuple[int, float]:
        """The number of drafts that promises most tokens for the time of a step; where that is none, after how many
        steps to try one."""
        p = self._right / (self._right + self._wrong)
        tokens, best, speed = 1.0, 0, 1.0
        for length in range(1, min(self._most, max(1, 2 * max(self._costs, default=0))) + 1):
            tokens += p**length
            if tokens / self._cost(length) > speed:
                best, speed = length, tokens / self._cost(length)
        return best, (self._cost(1) - 1 - p) / TRIALS

    def _cost(self, length: int) -> float:
        """The time of a round with so many drafts, in steps."""
        if length in self._costs:
            return self._costs[length]
        known = max((tried for tried in self._costs if tried < length), default=0)
        return 1 + (self._costs[known] - 1) * length / known if known else 1.0
