"""What a reply may be: the one interface of grammars and of filters that users write."""

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from exl2chat.errors import ChatError


class Constraint(Protocol):
    """Says which token may come next, for one reply, once it has begun. It fails rather than let anything else through.

    `accepting`: the reply may end here. `finished`: it is complete and nothing may follow. Both are false of a healed
    token that is still to come.
    """

    @property
    def accepting(self) -> bool: ...
    @property
    def finished(self) -> bool: ...

    def begin(self, continuing: bool = False, healed: int | None = None) -> None:
        """Start a reply. `continuing`: it goes on from text, so that its first space counts.

        healed: a token that was taken off the prompt's end; the first token of the reply repeats its text, and may go
        on from there.
        """

    def mask(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [V]; the caller's to change. ChatError if there is none."""

    def advance(self, token: int) -> None:
        """A token of the reply. ChatError, and nothing is changed, for one that the mask forbids."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""

    def forced(self) -> list[int]:
        """Tokens that probably come next because nothing else is possible: a draft to be verified, perhaps empty."""

    def clone(self) -> Self:
        """The same state, to be changed on its own."""


class AllOf:
    """Several constraints at once: a token must please all. The reply is finished as soon as one of them says so."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = tuple(constraints)

    @property
    def accepting(self) -> bool:
        return all(constraint.accepting for constraint in self._constraints)

    @property
    def finished(self) -> bool:
        return any(constraint.finished for constraint in self._constraints)

    def begin(self, continuing: bool = False, healed: int | None = None) -> None:
        for constraint in self._constraints:
            constraint.begin(continuing, healed)

    def mask(self) -> NDArray[np.bool_]:
        allowed: NDArray[np.bool_] = np.logical_and.reduce([constraint.mask() for constraint in self._constraints])
        if not allowed.any():
            raise ChatError("no token satisfies all filters of this reply", "use fewer of them")
        return allowed

    def advance(self, token: int) -> None:
        done: list[Constraint] = []
        try:
            for constraint in self._constraints:
                constraint.advance(token)
                done.append(constraint)
        except ChatError:
            for constraint in done:
                constraint.rollback(1)
            raise

    def rollback(self, count: int) -> None:
        for constraint in self._constraints:
            constraint.rollback(count)

    def forced(self) -> list[int]:
        return next((tokens for constraint in self._constraints if (tokens := constraint.forced())), [])

    def clone(self) -> Self:
        return type(self)([constraint.clone() for constraint in self._constraints])
