"""Which lines are commands and which are messages.

A line is a command if it begins with a slash and one word, so `/home/me/x` is a message. Case does not matter. A second
slash or a leading space makes a message of what would be a command; that one character is not sent.
"""

import re

WORD = "[A-Za-z][A-Za-z0-9_-]*"
COMMAND = re.compile(rf"/({WORD})(?:\s+|$)")
ESCAPED = re.compile(rf"(?:/|[ ][/ ]*)/{WORD}(?:\s|$)")


def literal(text: str) -> str:
    """The line that sends exactly `text`."""
    return " " + text if COMMAND.match(text) or ESCAPED.match(text) else text
