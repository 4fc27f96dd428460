"""How fast the dynamic generator writes many replies at once, and how soon a cached conversation goes on."""

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from exl2chat.engine.batch_drafting import Choosers
from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.jobs import Job, Streamed
from exl2chat.engine.reply_benchmark import OneLetter
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.engine.transformer import Transformer
from exl2chat.ops.kernel_benchmark import KernelRow
from exl2chat.progress import Progress
from exl2chat.settings import Sampling

PROMPT = 128
WARM_UP, STEPS = 8, 40
DRAFTED, LEARNING = (1, 8), 3
LONGEST = PAGE - PROMPT  # tokens of a reply: each job has one page
CONVERSATION, TURN, ROUNDS = 4096, 24, 5
CEILING = "a read of the weights and the cache"
ROOM = CONVERSATION + PAGE  # tokens of a cache for a conversation and its next turn


def measure_jobs(
    model: Transformer, cache: KVCache, counts: Sequence[int], bandwidth: float, progress: Progress
) -> list[KernelRow]:
    """The median time of a step in which so many jobs get a token each, drawn with top-k and top-p after prompts of
    PROMPT tokens, beside a read of the weights and of all their caches at `bandwidth`; of DRAFTED ones also what drafts
    bring and cost. `cache`: a page for each."""
    subject = DynamicGenerator(model, cache, OneLetter())  # type: ignore[arg-type]
    subject.warm_up()
    prompts = _prompts(model.config.vocab_size, PROMPT)
    result = []
    for count in counts:
        name = _name(count)
        progress(name)
        seconds = _step_seconds(subject, [next(prompts) for _ in range(count)])
        ceiling = _ceiling(model, cache, count, bandwidth)
        result.append(KernelRow(name, count, seconds * 1e6, ceiling * 1e6, CEILING, _name(1)))
    return [
        *result,
        *measure_drafts(model, cache, [count for count in DRAFTED if count in counts], bandwidth, progress),
    ]


def measure_turns(
    model: Transformer, cache: KVCache, ceilings: tuple[float, float], progress: Progress
) -> list[KernelRow]:
    """The median time to the first token of a conversation of CONVERSATION tokens that nobody has seen, and to that of
    its next turn after a reply and TURN more. ceilings: seconds of the prompt's products and attention, and of a step.
    `cache` has ROOM."""
    progress(f"first token of {CONVERSATION} tokens")
    subject = DynamicGenerator(model, cache, OneLetter())  # type: ignore[arg-type]
    prompts, turns = _prompts(model.config.vocab_size, CONVERSATION), _prompts(model.config.vocab_size, TURN)
    cold, cached = [], []
    for prompt, turn in zip((next(prompts) for _ in range(1 + ROUNDS)), turns, strict=False):
        seconds, reply = _first_token(subject, prompt)
        cold.append(seconds)
        cached.append(_first_token(subject, (*prompt, *reply, *turn))[0])
    first = f"first token of {CONVERSATION} tokens"
    products, step = (ceiling * 1e6 for ceiling in ceilings)
    return [
        KernelRow(first, CONVERSATION, median(cold[1:]) * 1e6, products, "torch.mm and torch's attention"),
        KernelRow(
            f"first token of its next turn, {TURN} tokens", TURN, median(cached[1:]) * 1e6, step, CEILING, first,
        ),
    ]  # fmt: skip


class Told:
    """Proposes what jobs are known to say, or in its place what they do not say."""

    def __init__(self) -> None:
        self.replies: Sequence[Sequence[int]] = ()  # by seed
        self.right = True

    def follow(self, plan: StepPlan) -> None:
        """Nothing depends on it."""

    def propose(self, rows: Sequence[Row], choosers: Choosers, count: int) -> Mapping[int, Sequence[int]]:
        drafts = {}
        for row in rows:
            at = choosers[row.job].count
            told = self.replies[choosers[row.job].seed][at : at + min(count, row.drafts)]
            drafts[row.job] = told if self.right else [token ^ 1 for token in told]
        return drafts


def measure_drafts(
    model: Transformer, cache: KVCache, counts: Sequence[int], bandwidth: float, progress: Progress
) -> list[KernelRow]:
    """The time for a token of each of so many jobs with drafts that are always right, or always wrong, beside that
    without drafts; when it is known what they cost. `cache`: a page for each."""
    plain = DynamicGenerator(model, cache, OneLetter(), speculate="off")  # type: ignore[arg-type]
    plain.warm_up()
    prompts = _prompts(model.config.vocab_size, PROMPT)
    result = []
    for count in counts:
        name = f"{_name(count)}, {LONGEST} tokens each"
        progress(name)
        jobs = [_job(prompt, LONGEST, seed) for seed, prompt in enumerate(next(prompts) for _ in range(count))]
        ceiling = _ceiling(model, cache, count, bandwidth) * 1e6
        seconds, replies = [_written(plain, jobs) for _ in range(2)][-1]
        result.append(KernelRow(name, count, seconds * 1e6, ceiling, CEILING))
        for right in (True, False):
            told = Told()
            subject = DynamicGenerator(model, cache, OneLetter(), drafter=told)  # type: ignore[arg-type]
            told.right = right
            for _ in range(LEARNING):  # drafts are right to the bit once these replies were written with drafts
                told.replies = replies
                seconds, replies = _written(subject, jobs)
            kind = "right" if right else "wrong"
            result.append(KernelRow(f"{name}, drafts always {kind}", count, seconds * 1e6, ceiling, CEILING, name))
    return result


def _written(subject: DynamicGenerator, jobs: Sequence[Job]) -> tuple[float, list[list[int]]]:
    """Seconds for a token of each job, from the first of all to the last, and the replies."""
    serials = [subject.enqueue(job) for job in jobs]
    replies: dict[int, list[int]] = {serial: [] for serial in serials}
    started, begun = 0.0, 0
    while subject.remaining:
        for result in subject.iterate():
            if isinstance(result, Streamed):
                replies[result.serial] += [token.id for token in result.tokens]
        if not started and all(replies.values()):
            started, begun = time.perf_counter(), min(map(len, replies.values()))
    return (time.perf_counter() - started) / (LONGEST - begun), [replies[serial] for serial in serials]


def _ceiling(model: Transformer, cache: KVCache, jobs: int, bandwidth: float) -> float:
    """Seconds of a read of the weights and of what the jobs' prompts have in the cache."""
    return (model.weights.read_bytes + cache.storage[..., 0, 0, :].nbytes * PROMPT * jobs) / bandwidth


def _name(jobs: int) -> str:
    return f"{jobs} {'job' if jobs == 1 else 'jobs'} at context {PROMPT}"


def _prompts(vocabulary: int, length: int) -> Iterator[tuple[int, ...]]:
    """Prompts of random tokens."""
    random = np.random.default_rng(1)
    while True:
        yield tuple(random.integers(vocabulary, size=length).tolist())


def _job(prompt: tuple[int, ...], longest: int, seed: int = 1) -> Job:
    return Job((prompt,), longest, Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=seed))


def _step_seconds(subject: DynamicGenerator, prompts: Sequence[tuple[int, ...]]) -> float:
    """Seconds of a step once every prompt is read."""
    waiting = {subject.enqueue(_job(prompt, LONGEST, seed)) for seed, prompt in enumerate(prompts)}
    while waiting:
        waiting -= {result.serial for result in subject.iterate() if isinstance(result, Streamed)}
    seconds = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        subject.iterate()
        seconds.append(time.perf_counter() - started)
    subject.clear()
    return median(seconds[WARM_UP:])


def _first_token(subject: DynamicGenerator, prompt: tuple[int, ...]) -> tuple[float, list[int]]:
    """Seconds until a reply to `prompt` begins, and the reply."""
    job = _job(prompt, TURN)
    started = time.perf_counter()
    subject.enqueue(job)
    first, reply = 0.0, []
    while subject.remaining:
        for result in subject.iterate():
            if isinstance(result, Streamed):
                first = first or time.perf_counter() - started
                reply += [token.id for token in result.tokens]
    return first, reply
