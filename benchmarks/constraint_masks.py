"""What a constraint costs: CPU microseconds a token at a vocabulary of 128,000, and milliseconds before the first.

    python benchmarks/constraint_masks.py [--vocabulary 128000] [--steps 2000]

The vocabulary is made of the words and beginnings of words of Python's own library, most frequent first, behind the 256
bytes: a trie like that of a byte-level tokenizer. Replies are drawn at random among the allowed tokens, which visits
more states than any model would. CPU time, not wall time: other work on the machine does not change it much.
"""

import argparse
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from exl2chat.engine.compile_grammar import compile_choice, compile_grammar, compile_json_schema, compile_regex
from exl2chat.engine.grammar import GrammarConstraint
from exl2chat.engine.token_table import TokenTable
from exl2chat.model.detokenizer import Piece
from exl2chat.model.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "scores": {"type": "array", "items": {"type": "number"}},
        "kind": {"enum": ["reader", "writer", "owner"]},
        "address": {"type": "object", "additionalProperties": {"type": ["string", "null", "boolean"]}},
    },
    "required": ["name", "email", "born", "scores", "kind", "address"],
}
ARITHMETIC = 'start: term (/[-+]/ term)*\nterm: factor (/[*\\/]/ factor)*\nfactor: /[0-9]+/ | "(" start ")" | /[a-z_]+/'
CASES: dict[str, Callable[[TokenTable], GrammarConstraint]] = {
    "JSON schema": lambda table: compile_json_schema(table, SCHEMA),
    "any JSON": lambda table: compile_json_schema(table, True),
    "regex": lambda table: compile_regex(table, r"(?s:.{0,200})\n\n([A-Z][a-z]+ ){3,20}\d{4}-\d\d-\d\d"),
    "grammar": lambda table: compile_grammar(table, ARITHMETIC),
    "choice of 1000": lambda table: compile_choice(table, [f"option number {n}" for n in range(1000)]),
}


class Words:
    """As much of a tokenizer as a table asks for. Token 0 ends a reply."""

    def __init__(self, count: int) -> None:
        seen: Counter[bytes] = Counter()
        library = Path(sysconfig.get_path("stdlib"))
        for file in [*library.glob("*.py"), *library.glob("[a-z]*/*.py")]:
            for word in re.findall(rb" ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+", file.read_bytes()):
                seen.update(word[:end] for end in range(2, min(len(word), 12) + 1))
        words = islice((word for word, _ in seen.most_common()), count - 257)
        self.pieces = [b"", *(bytes([byte]) for byte in range(256)), *words]

    def piece(self, token: int) -> Piece:
        return Piece(self.pieces[token], self.pieces[token])


def steps(constraint: GrammarConstraint, count: int) -> Iterator[tuple[float, float]]:
    """CPU seconds of the mask and of the advance, for `count` random tokens."""
    choose = random.Random(1)
    constraint.begin()
    for _ in range(count):
        start = time.thread_time()
        mask = constraint.mask()
        masked = time.thread_time() - start
        token = choose.choice(np.flatnonzero(mask))
        start = time.thread_time()
        constraint.advance(int(token))
        yield masked, time.thread_time() - start
        if constraint.finished:
            constraint.begin()


def timed(make: Callable[[], object]) -> float:
    start = time.thread_time()
    make()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    tokenizer = cast(Tokenizer, Words(options.vocabulary))
    start = time.thread_time()
    table = TokenTable(tokenizer, options.vocabulary, {0})
    print(f"table of {len(table.rows)} rows: {time.thread_time() - start:.2f} s")
    print("case | ready, ms | mask p50, us | p99 | max | advance p50, us | p99")
    for name, make in CASES.items():
        ready = [timed(lambda make=make: make(table)) * 1e3 for _ in range(5)]
        masks, advances = np.array(list(steps(make(table), options.steps))).T * 1e6
        fields = [*np.percentile(masks, [50, 99]), masks.max(), *np.percentile(advances, [50, 99])]
        print(" | ".join([name, f"{np.median(ready):.1f}", *(f"{field:.0f}" for field in fields)]))


if __name__ == "__main__":
    main()
