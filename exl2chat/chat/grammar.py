"""Which lines are commands and which are messages.

A line is a command if it matches `^/[a-z]+(\\s|$)`, so `/home/me/x` is a message. A second slash or a leading space
makes a message of what would be a command; that one character is not sent.
"""

import re

COMMAND = re.compile(r"/([a-z]+)(?:\s+|$)")
ESCAPED = re.compile(r"(?:/|[ ][/ ]*)/[a-z]+(?:\s|$)")


def literal(text: str) -> str:
    """The line that sends exactly `text`."""
    return " " + text if COMMAND.match(text) or ESCAPED.match(text) else text
