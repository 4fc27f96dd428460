"""When a reply ends and what it may not say: stop ids, stop strings, banned strings, and the text held back while one
of them may be forming. Pure Python."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from exl2chat.errors import UsageError

StopReason = Literal["eos", "stop_string", "max_tokens", "context", "stopped"]


class StopConditionError(UsageError, ValueError):
    """A stop condition that is neither a token id nor a string of at least one character."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Token ids and strings that end a reply. Neither appears in its text."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, conditions: Iterable[object]) -> "StopConditions":
        """From a mixture of ids and strings; StopConditionError (a ValueError) on anything else and on "".

        One string alone is refused too: its characters would each become a stop string.
        """
        if isinstance(conditions, str) or not isinstance(conditions, Iterable):
            raise StopConditionError(
                f"stop conditions are a list, not {conditions!r:.40}", f"write [{conditions!r:.40}]"
            )
        ids: set[int] = set()
        strings: dict[str, None] = {}
        for condition in conditions:
            if isinstance(condition, str) and condition:
                strings[condition] = None
            elif isinstance(condition, int) and not isinstance(condition, bool):
                ids.add(condition)
            else:
                raise StopConditionError(f"{condition!r} cannot end a reply", "give token ids and non-empty strings")
        return cls(frozenset(ids), tuple(strings))


class Match(NamedTuple):
    """A string that is complete in a text: of several the one that ends first, then the longest."""

    end: int
    start: int
    string: str


class Strings:
    """Strings to be found in text that grows."""

    def __init__(self, strings: Collection[str], any_case: bool = False) -> None:
        """StopConditionError for one string alone, whose characters would each count as one, and for empty ones."""
        if isinstance(strings, str) or not all(isinstance(string, str) and string for string in strings):
            raise StopConditionError(f"{strings!r:.40} is no list of texts", "give a list of non-empty strings")
        self._fold = lower if any_case else str
        self._strings = tuple(map(self._fold, strings))
        beginnings = {each[:length] for each in self._strings for length in range(1, len(each))}
        self._beginnings = tuple(sorted(beginnings, key=len, reverse=True))

    def find(self, text: str) -> Match | None:
        """The string that is complete first."""
        text = self._fold(text)
        found = [Match(at + len(each), at, each) for each in self._strings if (at := text.find(each)) >= 0]
        return min(found, default=None)

    def partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins one of the strings and is not all of it."""
        text = self._fold(text)
        if not text.endswith(self._beginnings):  # nearly always: 1 us
            return 0
        return next(len(each) for each in self._beginnings if text.endswith(each))

    def __bool__(self) -> bool:
        return bool(self._strings)


def lower(text: str) -> str:
    """`text` in lower case, character by character: none becomes two."""
    return "".join(small if len(small := char.lower()) == 1 else char for char in text)


class Passed(NamedTuple):
    """What is certain by now: text, and how many tokens have all of theirs in it or before."""

    text: str = ""
    tokens: int = 0


class Banned(NamedTuple):
    """A banned string came to be: so many tokens, of this text, are to be taken back."""

    tokens: int
    text: str


class Piece(NamedTuple):
    """Text of so many tokens."""

    text: str
    tokens: int


class Gate:
    """Holds text back while a stop string or a banned string may be forming. Case matters to the former only.

    Whichever is complete first counts, however the text is cut into tokens. A stop string sets `found`, and is held
    then with what follows; a banned one sets `banned`, and is forgotten by the next `push`, which is given what stands
    in its place. Where strings are banned, only whole tokens pass, and the tokens of a character that is still
    incomplete do not.
    """

    def __init__(self, stops: Collection[str] = (), banned: Collection[str] = ()) -> None:
        self._stops, self._bans = Strings(stops), Strings(banned, any_case=True)
        self._open = not self._stops and not self._bans
        self._pieces: list[Piece] = []
        self._given = 0  # characters of the first piece that have passed
        self.found: str | None = None
        self.banned: Banned | None = None

    def push(self, text: str) -> Passed:
        """One token's text, which may be "": what passes now."""
        if self._open:  # else it takes a third of the host's time for a token
            return Passed(text, 1)
        self.banned = None
        self._add(text)
        held = self.held
        stop, ban = self._stops.find(held), self._bans.find(held)
        if ban and not (stop and stop[:2] <= ban[:2]):
            self.banned = self._take_back(ban.start)
            return Passed()
        if stop:
            self.found = stop.string
            return self._pass(stop.start)
        return self._pass(self._certain(held))

    def flush(self) -> str:
        """The text that is held: no more is coming, so it was no such string."""
        text = self.held
        self._pieces.clear()
        self._given = 0
        return text

    def _certain(self, held: str) -> int:
        """How much of the held text is in no stop string and no banned one, even if what follows is taken back."""
        at = certain = len(held)
        while True:
            certain = min(certain, at - self._stops.partial(held[:at]))
            _, start = self._start(at - self._bans.partial(held[:at]))
            if start == at:
                return min(certain, at)
            at = start  # what follows may be taken back from here on, and something else come after held[:at]

    def _add(self, text: str) -> None:
        if self._bans and self._pieces and not self._pieces[-1].text:
            self._pieces[-1] = Piece(text, self._pieces[-1].tokens + 1)
        else:
            self._pieces.append(Piece(text, 1))

    @property
    def held(self) -> str:
        """The text that did not pass yet."""
        return "".join(piece.text for piece in self._pieces)[self._given :]

    def _start(self, at: int) -> tuple[int, int]:
        """Which piece has character `at` of the held text, and where in the text it starts; past the end: none."""
        end = -self._given
        for index, piece in enumerate(self._pieces):
            if at < end + len(piece.text):
                return index, max(end, 0)
            end += len(piece.text)
        return len(self._pieces), end

    def _take_back(self, at: int) -> Banned:
        index, start = self._start(at)
        banned = Banned(sum(piece.tokens for piece in self._pieces[index:]), self.held[start:])
        del self._pieces[index:]
        return banned

    def _pass(self, length: int) -> Passed:
        """Let the first `length` characters of the held text pass."""
        text, tokens, rest = self.held[:length], 0, length + self._given
        while self._pieces and len(self._pieces[0].text) <= rest:
            if self._bans and not self._pieces[0].text:
                break
            piece = self._pieces.pop(0)
            rest -= len(piece.text)
            tokens += piece.tokens
        self._given = rest
        return Passed(text, tokens)
