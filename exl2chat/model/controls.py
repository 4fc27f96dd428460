"""Text typed by a user, read from a file or written by a model never becomes a control token.

A control token is a special token, or an added one that is no word and no white space (fine-tunes add plain words,
Gemma runs of newlines; text encodes to these as ever). Before a template renders, each one found in message text is
replaced by a private-use character that occurs nowhere in the conversation; the tokenizer later encodes what it stands
for by the learned vocabulary alone. Nothing else in the text changes, so benign text renders and encodes exactly as it
would without this.

A template may trim, cut or join message texts, so that a control token could still arise from harmless parts. The
check is a second rendering in which each message is one opaque character: if the two do not show the same control
tokens in the same order, message text took part in one, and the opaque rendering is used, where it cannot.

In the assistant's own text, pairs like <think> and </think> that are added and not special stay as they are: templates
look for them to drop old reasoning.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exl2chat.errors import ContextError

PRIVATE_USE = range(0x100000, 0x10FFFE)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat. Characters in `hidden` stand for message text to be encoded without control tokens.

    neutralised: how many control tokens were found in message text.
    """

    text: str
    hidden: Mapping[str, str]
    neutralised: int = 0

    def reveal(self, text: str) -> str:
        """`text`, a part of this one, with what is hidden put back."""
        return text.translate({ord(mark): plain for mark, plain in self.hidden.items()})

    @property
    def visible(self) -> str:
        """The chat as the template alone would have rendered it."""
        return self.reveal(self.text)


class ControlTokens:
    """The control tokens among `ids` (by content), of which those in `special` are hidden from readers."""

    def __init__(self, ids: Mapping[str, int], special: frozenset[str]) -> None:
        plain = {content for content in ids if _is_blank(content) or (is_word(content) and content not in special)}
        self.ids = {content: token_id for content, token_id in ids.items() if content not in plain}
        self._any = either(self.ids)
        pairs = {content for content in self.ids.keys() - special if _counterpart(content) in self.ids.keys() - special}
        self._pairs = either(pairs)
        self._any_but_pairs = either(self.ids.keys() - pairs)

    def found_in(self, text: str) -> list[str]:
        """The control tokens in `text`, in order, longest match first."""
        return self._any.findall(text)

    def first_in(self, text: str) -> int | None:
        """The id of the control token `text` starts with, white space aside."""
        match = self._any.match(text.lstrip())
        return None if match is None else self.ids[match[0]]

    def neutralise(self, text: str) -> Rendered:
        """`text` by itself with its control tokens hidden."""
        disguise = Disguise(self, text)
        return Rendered(disguise.neutralise("user", text), disguise.hidden, disguise.neutralised)

    def in_message(self, role: str) -> re.Pattern[str]:
        """What is neutralised in the text of a message by `role`."""
        return self._any_but_pairs if role == "assistant" else self._any

    def kept_in_message(self, role: str) -> re.Pattern[str]:
        """What a template may see in the text of a message by `role`."""
        return self._pairs if role == "assistant" else either(())


class Disguise:
    """Private-use characters standing for texts, none of which occurs in `conversation`."""

    def __init__(self, controls: ControlTokens, conversation: str) -> None:
        taken = set(conversation)
        self._free = (chr(code) for code in PRIVATE_USE if chr(code) not in taken)
        self._controls = controls
        self._marks: dict[str, str] = {}
        self.neutralised = 0

    @property
    def hidden(self) -> dict[str, str]:
        """What each character in use stands for."""
        return {mark: text for text, mark in self._marks.items()}

    def hide(self, text: str) -> str:
        """The character that stands for `text`."""
        if text not in self._marks:
            mark = next(self._free, None)
            if mark is None:
                raise ContextError("the conversation uses every private-use character there is", "remove some")
            self._marks[text] = mark
        return self._marks[text]

    def neutralise(self, role: str, text: str) -> str:
        """`text` with its control tokens hidden, and counted."""
        hidden, count = self._controls.in_message(role).subn(lambda match: self.hide(match[0]), text)
        self.neutralised += count
        return hidden

    def opaque(self, role: str, text: str) -> str:
        """`text` as one character; white space at its ends, and markers a template may see, stay."""
        kept = self._controls.kept_in_message(role)
        parts = kept.split(text)
        marks = [*kept.findall(text), ""]
        return "".join(self._opaque_part(part) + mark for part, mark in zip(parts, marks, strict=True))

    def _opaque_part(self, text: str) -> str:
        core = text.strip()
        return text.replace(core, self.hide(core)) if core else text


def is_word(content: str) -> bool:
    """Whether an added token is text like any other: letters and digits."""
    return content.replace("▁", "").isalnum()


def _is_blank(content: str) -> bool:
    return not content.replace("▁", "").strip()


def _counterpart(content: str) -> str:
    """</think> for <think> and the reverse; "" for what is no tag."""
    name = content.removeprefix("</").removeprefix("<")
    return ("<" if content.startswith("</") else "</") + name if content.startswith("<") else ""


def either(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `contents`, the longest first; nothing if there are none."""
    by_length = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
