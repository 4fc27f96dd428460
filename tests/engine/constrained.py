"""Tokenizers of every kind with their tables, and replies drawn at random under a constraint."""

import functools
import random
import tempfile
from pathlib import Path

import numpy as np

from exl2chat.engine.constraints import Constraint
from exl2chat.engine.token_table import TokenTable
from exl2chat.model.tokenizer import Tokenizer, open_tokenizer
from tests.model.tokenizer_files import write_tokenizer

WITHOUT_BYTES = ("unigram", "spm_no_prefix")  # cannot write every character


@functools.cache
def table(kind: str) -> TokenTable:
    """The table of a small tokenizer, with two ids more than it has tokens."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = open_tokenizer(write_tokenizer(Path(folder), kind))
    return TokenTable(tokenizer, tokenizer.vocab_size + 2, tokenizer.eos_ids)


def tokenizer(kind: str) -> Tokenizer:
    return table(kind).tokenizer


def text_of(kind: str, ids: list[int], continuing: bool = False) -> str:
    """What a reader sees of a reply."""
    detokenizer = tokenizer(kind).detokenizer(continuing=continuing)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def spelled(kind: str, text: str, continuing: bool = False) -> list[int]:
    """`text` in some tokens, of a reply."""
    return tokenizer(kind).encode_following(text) if continuing else tokenizer(kind).encode(text)


def reply(constraint: Constraint, seed: int, end_ids: set[int], longest: int = 400) -> list[int]:
    """Tokens drawn at random among those allowed, up to a random place where the reply may end."""
    choose = random.Random(seed)
    ids: list[int] = []
    while not constraint.finished:
        allowed = set(np.flatnonzero(constraint.mask()).tolist())
        assert bool(allowed & end_ids) == constraint.accepting
        if constraint.accepting and (choose.random() < 0.3 or not allowed - end_ids):
            return ids
        token = choose.choice(sorted(allowed - end_ids))
        constraint.advance(token)
        ids.append(token)
        assert len(ids) < longest, "a reply without end"
    return ids
