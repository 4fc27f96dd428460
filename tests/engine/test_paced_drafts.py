"""Which drafts of a reply are tried, and what is told of them."""

from collections.abc import Sequence

import pytest

from exl2chat.engine.pace import Pace
from exl2chat.engine.paced_drafts import PacedDrafts, Source


class Every:
    """Has drafts after every so many tokens."""

    is_model = False

    def __init__(self, period: int, token: int) -> None:
        self._period, self._token, self.asked = period, token, 0

    def begin(self, _chooser: object) -> bool:
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        self.asked += 1
        return [] if len(tokens) % self._period else [self._token] * count


def test_each_drafter_has_a_pace_of_its_own() -> None:
    """One is always right and the other never: the one is followed as far as it goes, and the other hardly at all."""
    right, wrong = Source(Every(3, 1), Pace(4)), Source(Every(1, 2), Pace(4))
    subject = PacedDrafts([right, wrong])
    counts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for length in range(600):
        drafts = subject.propose([0] * length, 10)
        kind = drafts[0] if drafts else 0
        counts[kind].append(len(drafts))
        subject.took(len(drafts), len(drafts) if kind == 1 else 0, 0.01 * (1 + 0.2 * len(drafts)))
    assert counts[1][20:] == [4] * len(counts[1][20:])
    assert len(counts[1]) > 180
    assert len(counts[2]) < 60
    assert right.pace.step == wrong.pace.step == pytest.approx(0.01)


def test_no_more_is_proposed_than_there_is_room_for() -> None:
    pace = Pace(4)
    subject = PacedDrafts([Source(Every(1, 1), pace)])
    for _ in range(20):
        count = len(subject.propose([0], 9))
        subject.took(count, count, 0.01)
    assert [len(subject.propose([0], room)) for room in (-1, 0, 1, 3, 9)] == [0, 0, 1, 3, 4]
    assert [subject.expected([0], room) for room in (-1, 0, 1)] == [False, False, True]


def test_what_is_expected_of_a_model_is_not_asked() -> None:
    drafter = Every(2, 1)
    subject = PacedDrafts([Source(drafter, Pace(4))])
    assert not subject.expected([0, 0], 5)  # no step was timed
    for _ in range(3):
        subject.took(0, 0, 0.01)
    assert [subject.expected([0] * length, 5) for length in (2, 3)] == [True, False]
    drafter.asked, drafter.is_model = 0, True
    assert subject.expected([0] * 3, 5)
    assert drafter.asked == 0


def test_without_drafters_nothing_is_known_of_drafts() -> None:
    subject = PacedDrafts()
    assert subject.propose([0], 5) == []
    subject.took(0, 0, 0.01)
    assert subject.statistics == (0, 0, 1.0)
