"""Drafts of what jobs will say, and rounds that write down what they learn of them."""

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from exl2chat.engine import batch_drafting
from exl2chat.engine.batch_drafting import Choosers, Rounds
from exl2chat.engine.scheduler import Row, StepPlan
from tests.engine.speculative import Always

MOST = 4


class Told:
    """Drafts of what jobs will say, each token of which is right with a probability."""

    def __init__(self, replies: Mapping[int, Sequence[int]], right: float) -> None:
        self.replies, self.right, self.random = replies, right, random.Random(1)

    def follow(self, plan: StepPlan) -> None:
        """Nothing depends on it."""

    def propose(self, rows: Sequence[Row], choosers: Choosers, count: int) -> Mapping[int, Sequence[int]]:
        drafts = {}
        for row in rows:
            at = choosers[row.job].count
            told = self.replies[row.job][at : at + min(count, row.drafts)]
            drafts[row.job] = [token if self.random.random() < self.right else (token + 1) % 256 for token in told]
        return drafts


class Heard(Always):
    """A pace that writes down what it is told."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.told: list[tuple[object, ...]] = []

    def stepped(self, seconds: float) -> None:
        self.told.append((seconds,))

    def drafted(self, count: int, accepted: Sequence[int], seconds: float) -> None:
        self.told.append((count, list(accepted), seconds))


def row(serial: int, drafts: int = 0, tokens: int = 1) -> Row:
    return Row(serial, 0, 5, (1,) * tokens, (0,), drafts)


def heard_rounds(monkeypatch: pytest.MonkeyPatch, drafter: Told) -> tuple[Rounds, list[list[tuple[object, ...]]]]:
    """Rounds whose steps take a second each, and what each pace was told, in the order in which they were made."""
    told: list[list[tuple[object, ...]]] = []

    def made(most: int) -> Heard:
        pace = Heard(most)
        told.append(pace.told)
        return pace

    monkeypatch.setattr(batch_drafting, "Pace", made)
    times: Iterator[float] = iter(np.arange(100.0))
    return Rounds(drafter, MOST, clock=lambda: next(times)), told


class Constrained:
    """The chooser of a job whose constraint forces `tokens`."""

    count = 0

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    @property
    def constrained(self) -> bool:
        return bool(self._tokens)

    def forced(self) -> list[int]:
        return self._tokens
