"""Models of hashes that compute several rows at a time, drafters that are right or wrong, paces that never change."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from exl2chat.engine import decoders
from exl2chat.engine.generators import streaming
from exl2chat.engine.generators.streaming import StreamingGenerator, StreamResult
from tests.engine.fake_model import Claimed, FakeModel, FakeTokenizer


class RowsCache(Claimed):
    """Remembers token ids where a real cache has keys and values, those behind its end too."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self.length = 0
        self.memory = [-1] * capacity

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


class RowsModel(FakeModel):
    """Logits of every token, each a function of all tokens in the cache up to it. Fails where they do not fit."""

    def forward(self, tokens: torch.Tensor, cache: Any, last_only: bool = False) -> torch.Tensor:
        ids = tokens.tolist()
        start, end = cache.length, cache.length + len(ids)
        assert len(ids) > 0
        assert end <= cache.capacity
        cache.memory[start:end] = ids
        cache.length = end
        self.calls.append(len(ids))
        ends = range(end if last_only else start + 1, end + 1)
        return torch.from_numpy(np.stack([self.logits(cache.memory[:n]) for n in ends]))


class Guided:
    """Drafts of `sequence`, which is how the reply goes on, passed through `change`."""

    is_model = False

    def __init__(self, change: Callable[[int], int]) -> None:
        self.sequence: list[int] = []
        self._change = change

    def begin(self, chooser: object) -> bool:  # noqa: ARG002
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return [self._change(token) for token in self.sequence[len(tokens) : len(tokens) + count]]


def sometimes() -> Guided:
    """Right in four of five."""
    chance = random.Random(5)
    return Guided(lambda token: token if chance.random() < 0.8 else (token + 1) % 256)


DRAFTERS: dict[str, Callable[[], Guided]] = {
    "right": lambda: Guided(lambda token: token),
    "wrong": lambda: Guided(lambda token: (token + 1) % 256),
    "random": sometimes,
}


class Always:
    """A pace that drafts as much as it may."""

    step = 1.0

    def __init__(self, most: int) -> None:
        self._most = most

    def length(self) -> int:
        return self._most

    def stepped(self, seconds: float) -> None:
        pass

    def drafted(self, count: int, accepted: Sequence[int], seconds: float) -> None:
        pass


def speculating(
    monkeypatch: pytest.MonkeyPatch, drafter: object, model: FakeModel, capacity: int = 1000, most: int = 4
) -> StreamingGenerator:
    """A generator that always drafts, with `drafter`."""
    monkeypatch.setattr(decoders, "Pace", Always)
    monkeypatch.setattr(streaming, "choose_drafters", lambda *_: (drafter,))
    return StreamingGenerator(model, RowsCache(capacity), FakeTokenizer(), num_speculative_tokens=most)  # type: ignore[arg-type]


def plain(model: FakeModel, capacity: int = 1000) -> StreamingGenerator:
    """A generator without drafts."""
    return StreamingGenerator(model, RowsCache(capacity), FakeTokenizer(), speculate="off")  # type: ignore[arg-type]


def results_of(subject: StreamingGenerator) -> list[StreamResult]:
    """All results of the reply that was begun."""
    results = [subject.stream_ex()]
    while not results[-1].eos:
        results.append(subject.stream_ex())
    return results
