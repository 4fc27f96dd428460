"""Replies with options in any combination are the same in both generators, with drafts and without, alone and in a
batch whose jobs take each other's pages."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from exl2chat.engine import batch_drafting, decoders
from exl2chat.engine.cache import PAGE
from exl2chat.engine.compile_grammar import compile_choice, compile_regex
from exl2chat.engine.constraints import AllOf, Constraint
from exl2chat.engine.drafting import Speculate
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.filters import FilterConstraint
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import REASONS, Extras, StreamingGenerator
from exl2chat.engine.replies.jobs import Choice, Failed, Job, Streamed
from exl2chat.engine.scheduler import Limits
from exl2chat.engine.stopping import StopConditions
from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling
from tests.engine.fake_model import END, OTHER_END, VOCABULARY
from tests.engine.speculative import Always
from tests.engine.tiny_models import Anything, ByteTokenizer, byte_model

WORDS = {1: "ab", 2: " a", 3: "bc", 4: "é", 5: "aé", 6: "abc", 7: " b", 8: "B"}
TOKENS = (*WORDS, 0xC3, 0xA9, *b"abc AB", END, OTHER_END)  # the bytes of é, too
STRINGS = ["ab", "a", "é", "bc a", "cab", " a", "abab", "c", "aé", "B", "b b"]
OPTIONS: dict[str, Any] = {
    "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "penalty_range": 5,
    "penalty_decay": 4, "top_n_sigma": 1.5, "tfs": 0.9, "typical_p": 0.8, "mirostat_tau": 2.0, "smoothing_factor": 0.3,
    "max_temperature": 1.5, "skew": 0.3, "xtc_probability": 0.5, "dry_multiplier": 0.8, "temperature_last": True,
}  # fmt: skip
KINDS: tuple[Speculate, ...] = ("off", "ngram", "draft")
PARTS, BATCH = 6, 5


class Words(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return list(text.removeprefix(" ").encode())


TOKENIZER: Any = Words(WORDS)


class NotTwice(Anything):
    """No token after itself; "abc" ends the reply."""

    last: int | None = None

    def clone(self) -> "NotTwice":
        return NotTwice()

    def begin(self, prefix_str: str) -> None:  # noqa: ARG002
        self.last = None

    def feed(self, token: torch.Tensor) -> None:
        self.last = int(token)

    def next(self) -> tuple[Any, Any]:
        return [token for token in TOKENS if token != self.last], (6,)


def exchange(choice: Choice) -> None:
    if choice.token == ord("a"):
        choice.token = 2


class Reply(NamedTuple):
    """What became of a job. error: why it failed."""

    text: str
    tokens: list[int]
    reason: str | None
    suppressed: list[str]
    error: str = ""


def constraint(chance: random.Random) -> Constraint | None:
    table = TokenTable(TOKENIZER, VOCABULARY, {END})
    expression = chance.choice(["(ab|c| a|é)*B", "[abcé ]{3,9}", "a.*", "abcabc[ab]c"])
    made: list[Constraint | None] = [
        compile_regex(table, expression),
        compile_choice(table, ["abc abc", "éa", "bab"]),
        FilterConstraint(table, NotTwice()),
        AllOf([FilterConstraint(table, NotTwice()), compile_regex(table, "[abcé ]*")]),
    ]
    return chance.choice([*made, None, None, None, None])


def some(chance: random.Random, share: float) -> list[str]:
    return chance.sample(STRINGS, 2) if chance.random() < share else []


def random_job(seed: int) -> Job:
    chance = random.Random(seed)
    length = chance.choice([1, 2, 5, 20, 70, 255, 256, 257, 300])
    prompt = [chance.choice([*b"abc ", *range(1, 7)]) for _ in range(length)]
    embeddings: tuple[InputEmbeddings, ...] = ()
    if chance.random() < 0.2 and length > 5:
        rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) / 10
        embeddings = (InputEmbeddings.of(rows),)
        prompt[1:4] = embeddings[0].ids
    settings = {name: value for name, value in OPTIONS.items() if chance.random() < 0.2}
    temperature = chance.choice([0, 0.7, 1.0, 1.5])
    sampling = Sampling(temperature=temperature, seed=seed, allowed_tokens=TOKENS, dry_breakers=(), **settings)
    stops = [*[END][: chance.random() < 0.7], *some(chance, 0.4)]
    return Job(
        (tuple(prompt),), chance.randrange(1, 40), sampling, StopConditions.of(stops),
        heal=chance.random() < 0.4, banned=some(chance, 0.4), constraint=constraint(chance),
        prefer_end=chance.random() < 0.2, special=chance.random() < 0.2, continuing=chance.random() < 0.5,
        hooks=(exchange,) * (chance.random() < 0.2), embeddings=embeddings,
    )  # fmt: skip


def streamed(job: Job, kind: Speculate) -> Reply:
    model = byte_model()
    draft = model if kind == "draft" else None
    subject = StreamingGenerator(model, model.new_cache(512), TOKENIZER, draft, speculate=kind)
    subject.set_stop_conditions([*job.stops.ids, *job.stops.strings])
    own = job.constraint.clone() if job.constraint else None
    extras = Extras(own, job.prefer_end, job.heal, job.banned, hooks=job.hooks)
    subject.begin_stream_ex(
        job.prompts[0], job.sampling, max_new_tokens=job.max_new_tokens, extras=extras,
        decode_special_tokens=job.special, continuing=job.continuing, embeddings=job.embeddings,
    )  # fmt: skip
    reply = Reply("", [], None, [])
    while reply.reason is None:
        try:
            result = subject.stream_ex()
        except ChatError as error:
            return reply._replace(error=str(error))
        suppressed = [*reply.suppressed, *[result.suppressed] * (result.suppressed != "")]
        reply = Reply(reply.text + result.text, [*reply.tokens, *result.tokens], result.stop_reason, suppressed)
    return reply


def batched(jobs: Sequence[Job], kind: Speculate) -> list[Reply]:
    model = byte_model()
    limits = Limits(batch=3, queue=100, chunk=50, drafts=4 * (kind != "off"))
    draft = model if kind == "draft" else None
    subject = DynamicGenerator(model, model.new_cache(5 * PAGE), TOKENIZER, limits, draft, speculate=kind)
    replies = {subject.enqueue(job): Reply("", [], None, []) for job in jobs}
    while subject.remaining:
        for result in subject.iterate():
            reply = replies[result.serial]
            if isinstance(result, Failed):
                replies[result.serial] = reply._replace(error=str(result.error))
            elif isinstance(result, Streamed):
                tokens = [*reply.tokens, *(token.id for token in result.tokens)]
                taken = "".join(token.text for token in result.suppressed)
                reason = REASONS[result.final.reason] if result.final else None
                suppressed = [*reply.suppressed, *[taken] * (taken != "")]
                replies[result.serial] = Reply(reply.text + result.text, tokens, reason, suppressed)
    return list(replies.values())


@pytest.mark.parametrize("part", range(PARTS))
def test_a_reply_is_the_same_however_it_comes_about(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "Pace", Always)
    monkeypatch.setattr(batch_drafting, "Pace", Always)
    jobs = [random_job(part * BATCH + number) for number in range(BATCH)]
    expected = [streamed(job, "off") for job in jobs]
    for job, reply in zip(jobs, expected, strict=True):
        assert not [text for text in job.banned if text.lower() in reply.text.lower()]
        assert len(reply.tokens) <= job.max_new_tokens
    for kind in KINDS:
        assert [streamed(job, kind) for job in jobs] == expected
        assert batched(jobs, kind) == expected
