"""How much is drafted, on a clock of our own: what pays is done, and what does not is hardly tried."""

import random
from collections.abc import Callable

import pytest

from exl2chat.engine.pace import Pace

CHEAP = {n: 1 + 0.03 * n for n in range(9)}  # a row more costs 3 % of a step
DEAR = {n: 1 + 0.75 * n for n in range(9)}  # as much as a step, nearly
H200 = {0: 1, 1: 1.29, 2: 1.38, 3: 1.45, 4: 1.5, 5: 1.57, 6: 1.62, 7: 1.55}  # measured with an 8B model
CLIFF = {n: 1 + 0.03 * n + 6 * (n > 3) for n in range(9)}  # from five rows on another product


def speed(costs: dict[int, float], right: Callable[[int], int], rounds: int = 2000, pace: Pace | None = None) -> float:
    """Tokens for the time of a step, where of n drafts right(n) are right and a round with n takes costs[n]."""
    pace = pace or Pace(7)
    tokens = seconds = 0.0
    for _ in range(rounds):
        count = pace.length()
        accepted = right(count)
        seconds += costs[count]
        tokens += 1 + accepted
        if count:
            pace.drafted(count, [accepted], costs[count] * 0.01)
        else:
            pace.stepped(0.01)
    return tokens / seconds


def always(count: int) -> int:
    return count


def never(_count: int) -> int:
    return 0


def test_right_drafts_are_three_times_as_fast() -> None:
    assert speed(CHEAP, always) > 5
    assert speed({n: 1 + 0.15 * n for n in range(9)}, always) > 3


@pytest.mark.parametrize("costs", [CHEAP, DEAR, CLIFF], ids=["cheap", "dear", "cliff"])
def test_wrong_drafts_cost_less_than_a_twentieth(costs: dict[int, float]) -> None:
    assert speed(costs, never) > 0.95
    assert speed(costs, never, rounds=200) > 0.93


def test_a_length_that_costs_much_more_is_left_alone() -> None:
    assert speed(CLIFF, always) > 0.9 * 4 / CLIFF[3]


def test_drafts_that_come_as_dear_as_steps_are_not_made() -> None:
    assert speed(DEAR, lambda count: min(count, 1)) > 0.95


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("costs", [CHEAP, DEAR, H200], ids=["cheap", "dear", "h200"])
def test_drafts_of_chance_come_near_the_best_number_of_them(costs: dict[int, float], p: float) -> None:
    """Of which nobody knows beforehand how often they are right; the mean of 20 replies."""
    chance = random.Random(1)

    def sometimes(count: int) -> int:
        return next((n for n in range(count) if chance.random() >= p), count)

    best = max(sum(p**n for n in range(count + 1)) / costs[count] for count in range(8))
    assert sum(speed(costs, sometimes, 500) for _ in range(20)) / 20 > 0.92 * best


def test_drafting_comes_back_when_it_pays_again() -> None:
    pace = Pace(7)
    assert speed(CHEAP, never, 500, pace) < 1
    assert speed(CHEAP, always, 400, pace) > 1
    assert speed(CHEAP, always, 400, pace) > 5


def test_a_time_that_was_bad_once_is_seen_again() -> None:
    pace = Pace(4)
    speed({**CHEAP, 4: 50.0}, always, 100, pace)
    assert pace.length() < 4
    speed(CHEAP, always, 200, pace)
    assert speed(CHEAP, always, 200, pace) > 4


def test_drafts_that_seemed_very_dear_are_tried_again() -> None:
    pace = Pace(7)
    speed({**CHEAP, 1: 1000.0}, always, 10, pace)
    assert pace.length() == 0
    speed(CHEAP, always, 600, pace)
    assert speed(CHEAP, always, 600, pace) > 5


def test_nothing_is_drafted_before_a_step_was_timed() -> None:
    pace = Pace(7)
    for _ in range(2):
        assert pace.length() == 0
        pace.stepped(0.01)
    assert pace.length() == 1


def test_no_more_is_drafted_than_allowed() -> None:
    pace, seen = Pace(3), set()
    for _ in range(300):
        count = pace.length()
        seen.add(count)
        if count:
            pace.drafted(count, [count], 0.0101)
        else:
            pace.stepped(0.01)
    assert seen == {0, 1, 2, 3}


def test_the_first_round_of_a_length_may_wait_for_a_recording() -> None:
    """A graph of its number of rows: 50 times as long as a step."""
    pace, tried = Pace(7), set[int]()
    for _ in range(60):
        count = pace.length()
        if count:
            pace.drafted(count, [count], 0.0103 if count in tried else 0.5)
            tried.add(count)
        else:
            pace.stepped(0.01)
    assert pace.length() == 7


def test_a_pause_of_the_reader_is_no_step() -> None:
    """Else rounds would seem cheap for the next thousands of tokens."""
    pace = Pace(7)
    speed(CHEAP, never, 100, pace)
    pace.stepped(100.0)
    assert speed(DEAR, never, 200, pace) > 0.95
