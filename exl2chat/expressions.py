"""Regular expressions as grammars: for those who take them from the user and for those who follow them."""

import re

from llguidance import regex_to_lark

from exl2chat.errors import UsageError

PARSE_ERROR = re.compile(r"regex parse error:\n {4}.*\n {4}(?P<before> *)\^+\nerror: (?P<reason>.*)")
INVALID = re.compile(r"\(in regex\): (?P<reason>.*)")


def check_text(kind: str, *texts: str) -> None:
    """UsageError for a surrogate: llguidance takes UTF-8, which has none."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise UsageError(f"{kind}, character {fault.start + 1}: half a surrogate pair", "take it out") from None


def regex_as_lark(pattern: str) -> str:
    """A Lark grammar of what `pattern` matches from first to last character. UsageError for a surrogate in it."""
    check_text("regular expression", pattern)
    return f"start: /{regex_to_lark(pattern, use_ascii='')}/"


def regex_reason(error: str) -> str:
    """The place in the expression, and what is wrong there. llguidance speaks of the grammar around it."""
    if found := PARSE_ERROR.search(error):
        return f", character {len(found['before']) + 1}: {found['reason']}"
    return f": {found['reason'] if (found := INVALID.search(error)) else ' '.join(error.split()):.200}"
