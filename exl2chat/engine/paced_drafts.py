"""How much of what drafters propose for a reply is tried, and what came of it."""

from collections.abc import Sequence
from typing import NamedTuple

from exl2chat.engine.drafting import Drafter
from exl2chat.engine.pace import Pace


class Speculated(NamedTuple):
    """What drafts did for a reply: tokens drafted, those of them that became part of it, and the factor by which the
    model's time per token fell; 1 where that is not known."""

    drafted: int = 0
    accepted: int = 0
    speed_up: float = 1.0


class Source(NamedTuple):
    """A drafter, and a pace of its own: some are right more often than others."""

    drafter: Drafter
    pace: Pace


class PacedDrafts:
    """The drafts of one reply, whose steps are rounds where they have drafts."""

    def __init__(self, sources: Sequence[Source] = ()) -> None:
        """The first that has an idea is followed. Each drafter has begun with the reply."""
        self._sources = sources
        self._pace: Pace | None = None  # of the drafts that were proposed last
        self._drafted = self._accepted = self._tokens = 0
        self._seconds = 0.0

    @property
    def statistics(self) -> Speculated:
        plain = next((source.pace.step for source in self._sources), None)
        speed_up = self._tokens * plain / self._seconds if plain and self._accepted and self._seconds else 1.0
        return Speculated(self._drafted, self._accepted, speed_up)

    def expected(self, tokens: Sequence[int], room: int) -> bool:
        """Whether there may be drafts after `tokens`, of which up to `room` would be of use. A model is not asked."""
        return any(
            source.drafter.is_model or source.drafter.propose(tokens, 1)
            for source in self._sources
            if min(source.pace.length(), room) > 0
        )

    def propose(self, tokens: Sequence[int], room: int) -> list[int]:
        """Up to `room` drafts after `tokens`, for the next step."""
        for source in self._sources:
            count = min(source.pace.length(), room)
            if count > 0 and (drafts := source.drafter.propose(tokens, count)):
                self._pace = source.pace
                self._drafted += len(drafts)
                return drafts
        return []

    def took(self, count: int, right: int, seconds: float) -> None:
        """A step took so long, with drafting. It had none, or those proposed last, of which so many were right."""
        self._tokens += 1 + right
        self._seconds += seconds
        if count and self._pace is not None:
            self._pace.drafted(count, [right], seconds)
        elif not count:
            for source in self._sources:
                source.pace.stepped(seconds)

    def accept(self) -> None:
        """A draft became part of the reply."""
        self._accepted += 1
