"""Bits-per-weight branches: the spellings in use, and which branch a wish like `4.0bpw` means."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from exl2chat.errors import ModelError

# As found on the hub: 4.0bpw, 4_0, 5.8bpw_h8, 3.80bpw_H6, 4.0bpw_h6, 6bpw-h8-exl2
_SPELLING = re.compile(r"(\d{1,2})(?:[._](\d{1,3}))?(?:[_-]?bpw)?(?:[_-]?h(\d{1,2}))?(?:[_-]exl2)?", re.IGNORECASE)
NEAR = 0.25


@dataclass(frozen=True, slots=True)
class Bitrate:
    """Bits per weight, and those of the head where they are said."""

    bits: float
    head: int | None


def parse_bitrate(name: str) -> Bitrate | None:
    """What the branch name `name` says; None if it is not a bitrate."""
    found = _SPELLING.fullmatch(name)
    if not found:
        return None
    whole, fraction, head = found.groups()
    return Bitrate(float(f"{whole}.{fraction or 0}"), int(head) if head else None)


def choose_branch(repo: str, wish: str, branches: Sequence[str]) -> str:
    """The branch of `repo` that `wish` means: spelled alike, else of equal bits, else the nearest within NEAR bits.

    ModelError, listing the branches, when none or several will do.
    """
    if wish in branches:
        return wish
    wanted = parse_bitrate(wish)
    if wanted is None:
        raise ModelError(f"{repo}: '{wish}' is not a bitrate", "write it like 4.0bpw; @ names any other branch")
    known = {branch: rate for branch in branches if (rate := parse_bitrate(branch))}
    fitting = {name: abs(rate.bits - wanted.bits) for name, rate in known.items() if wanted.head in (None, rate.head)}
    best = min(fitting.values(), default=NEAR + 1)
    nearest = [name for name, distance in fitting.items() if distance == best]
    if best > NEAR:
        raise ModelError(f"{repo} has no branch near {wish}", f"it has {', '.join(branches) or 'none'}")
    if len(nearest) > 1:
        raise ModelError(f"{repo} has several branches of {wish}", f"name one of {', '.join(nearest)} after @")
    return nearest[0]
