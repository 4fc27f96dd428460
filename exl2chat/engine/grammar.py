"""Replies that follow a JSON schema, a regular expression, a grammar or a list of choices, by llguidance.

Whatever the library cannot follow to the letter is refused before the first token: a keyword of JSON Schema that it
lacks, a look-ahead, a rule that does not exist. During a reply, a token outside the grammar and a grammar that grows
beyond the library's limits are errors too.
"""

from typing import NamedTuple, Self

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import ChatError


class _Advance(NamedTuple):
    """What one token did: how many rows the matcher took, and the state before."""

    rows: int
    opening: bool
    healed: bytes | None


class GrammarConstraint:
    """A `Constraint` over one matcher. `compile_json_schema` and its like make one."""

    def __init__(self, table: TokenTable, matcher: LLMatcher) -> None:
        self._table, self._matcher = table, matcher
        self._opening = True
        self._healed: bytes | None = None
        self._ended = False
        self._advances: list[_Advance] = []

    @property
    def accepting(self) -> bool:
        return self._healed is None and bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return self._ended or (self.accepting and bool(self._matcher.is_stopped()))

    def begin(self, continuing: bool = False, healed: int | None = None) -> None:
        self._matcher.reset()
        self._advances.clear()
        self._ended = False
        self._healed = None if healed is None else self._table.texts[healed]
        self._opening = not continuing

    def mask(self) -> NDArray[np.bool_]:
        if self._ended:
            allowed = np.zeros(self._table.size, np.bool_)
        elif self._healed is not None:
            allowed = self._healing_mask(self._healed)
        else:
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            rows = np.unpackbits(packed, bitorder="little").view(np.bool_)
            allowed = rows[self._table.openings] if self._opening else rows[: self._table.size]
            self._check()
            if self._opening:
                allowed[self._table.silent] = allowed.any()  # of use only if something follows
        allowed[self._table.end_ids] = self.accepting
        if not allowed.any():
            raise ChatError("no token of this model can continue the reply as the grammar asks", "relax the grammar")
        return allowed

    def _healing_mask(self, healed: bytes) -> NDArray[np.bool_]:
        """Tokens that begin with the healed text and go on as the grammar begins. Each is asked for: 1 us or so."""
        allowed = np.zeros(self._table.size, np.bool_)
        for token, text in enumerate(self._table.texts):
            if text.startswith(healed) and text:
                rest = self._spelled(text[len(healed) :])
                allowed[token] = self._matcher.validate_tokens(rest) == len(rest)
        return allowed

    def _spelled(self, text: bytes) -> list[int]:
        return [self._table.byte_row + byte for byte in text]

    def advance(self, token: int) -> None:
        before = _Advance(0, self._opening, self._healed)
        if token in self._table.end_ids:
            if not self.accepting:
                raise ChatError("the reply ends before it is what the grammar asks for")
            self._ended = True
            self._advances.append(before)
            return
        rows = self._rows(token)
        if self._ended or rows is None or self._matcher.validate_tokens(rows) != len(rows):
            raise ChatError(f"token {token} is not what the grammar asks for")
        self._matcher.consume_tokens(rows)
        self._check()
        self._healed = None
        self._opening = self._opening and not self._table.shown(token)
        self._advances.append(before._replace(rows=len(rows)))

    def _rows(self, token: int) -> list[int] | None:
        """What the matcher has to take for a token; None where it cannot stand here."""
        if self._healed is not None:
            text = self._table.texts[token]
            return self._spelled(text[len(self._healed) :]) if text and text.startswith(self._healed) else None
        if not self._opening:
            return [token]
        return [] if token in self._table.silent else [int(self._table.openings[token])]

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._advances):
            raise ValueError(f"{count} of {len(self._advances)} tokens")
        if count == 0:
            return
        undone = self._advances[-count:]
        del self._advances[-count:]
        self._matcher.rollback(sum(advance.rows for advance in undone))
        self._check()
        self._ended = False
        _, self._opening, self._healed = undone[0]

    def forced(self) -> list[int]:
        """The one possible text, tokenised; less its last token, which what follows might be joined to."""
        if self._ended or self._healed is not None:
            return []
        data = self._matcher.compute_ff_bytes()
        text = data.decode("utf-8", "ignore")
        tokenizer = self._table.tokenizer
        ids = tokenizer.encode(text) if self._opening else tokenizer.encode_following(text)
        found = 0
        for count, token in enumerate(ids[:-1]):
            row = int(self._table.openings[token]) if self._opening and count == 0 else token
            spelled = self._table.rows[row]
            if not spelled or data[found : found + len(spelled)] != spelled:
                return ids[:count]
            found += len(spelled)
        return ids[:-1]

    def clone(self) -> Self:
        copy = type(self)(self._table, self._matcher.deep_copy())
        copy._opening, copy._healed, copy._ended = self._opening, self._healed, self._ended
        copy._advances = list(self._advances)
        return copy

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise ChatError(f"the grammar cannot be followed any further: {reason:.200}", "use a simpler one")
