"""How near whole decoding steps and prompts on a GPU come to what its memory and its matrix units allow."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.jobs_benchmark import CONVERSATION, ROOM, measure_jobs, measure_turns
from exl2chat.engine.reply_benchmark import REPLY, measure_reply
from exl2chat.engine.speculation_benchmark import measure_drafts
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.ops.attention import PLAIN_BITS
from exl2chat.ops.kernel_benchmark import KernelRow
from exl2chat.progress import Progress

STEPS = 40
PROMPTS = 4
PRODUCTS = 8
DRAFTED, ROUNDS = 160, 5  # tokens of a reply with drafts, and how often it is written


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed: steps of each of `rows` tokens at each of `contexts`, where 1 is a reply of `reply` tokens; a
    reply of `drafted` tokens with drafts at the first of them; prompts of so many tokens; so many jobs of the dynamic
    generator at a time, and the turns of a conversation."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    reply: int = REPLY
    drafted: int = 0
    jobs: tuple[int, ...] = ()
    turns: bool = False

    @property
    def room(self) -> int:
        """Tokens that the cache must hold."""
        replies = [context + max(self.reply, *self.rows) for context in self.contexts]
        replies += [context + self.drafted for context in self.contexts[:1]]
        return max((*replies, *self.prompts, PAGE * max(self.jobs, default=0), ROOM * self.turns))

    def within(self, room: int) -> "Workload":
        """As much of it as a cache for `room` tokens allows, and one prompt in any case."""
        contexts = tuple(context for context in self.contexts if context + max(self.reply, *self.rows) <= room)
        drafted = self.drafted if contexts and contexts[0] + self.drafted <= room else 0
        prompts = tuple(prompt for prompt in self.prompts if prompt <= room) or (room,)
        jobs = tuple(count for count in self.jobs if PAGE * count <= room)
        turns = self.turns and room >= ROOM
        return replace(self, contexts=contexts, drafted=drafted, prompts=prompts, jobs=jobs, turns=turns)


WORKLOAD = Workload(
    contexts=(128, 4096, 32768), rows=(1, 5), prompts=(64, 2048, 8192), drafted=DRAFTED, jobs=(1, 8, 32, 64), turns=True
)
CACHE_WORKLOAD = Workload(contexts=(4096, 32768), rows=(1, 5), prompts=())
SHORT_WORKLOAD = Workload(contexts=(128,), rows=(1,), prompts=())


def measure_steps(model: Transformer, bandwidth: float, work: Workload, progress: Progress) -> list[KernelRow]:
    """Steps as a generator takes them, the logits of the last token on the host; prompts in chunks.

    The ceiling of a step is a read, at `bandwidth` bytes per second, of the packed weights and of the cache that it
    looks at; that of a prompt is torch.mm of its tokens with float16 copies of the matrices, and torch's attention.
    """
    cache = model.new_cache(work.room)
    if cache.bits == PLAIN_BITS:
        cache.storage.normal_()
    else:
        cache.storage.random_(0, 60)  # any codes, and scales below 1
    rows = [*_prompts(model, cache, work, progress), *_steps(model, cache, bandwidth, work, progress)]
    if work.drafted:
        progress("reply with drafts")
        rows += measure_drafts(model, cache, work.contexts[0], work.drafted, ROUNDS)
    if work.jobs:
        rows += measure_jobs(model, cache, work.jobs, bandwidth, progress)
    if work.turns:
        ceilings = _prompt_ceiling(model, CONVERSATION), _step_ceiling(model, cache, CONVERSATION, bandwidth)
        rows += measure_turns(model, cache, ceilings, progress)
    return rows


def as_objects(rows: list[KernelRow]) -> list[dict[str, str | int | float]]:
    """For JSON: `tokens_per_second`, and how many times as long a row takes as its `one` (`times_one`)."""
    times = {row.name: row.microseconds for row in rows}
    objects = []
    for row in rows:
        figures = row.as_object() | {"tokens_per_second": round(row.rows * 1e6 / row.microseconds, 1)}
        if row.one in times and row.one != row.name:
            figures["times_one"] = round(row.microseconds / times[row.one], 3)
        objects.append(figures)
    return objects


def _steps(model: Transformer, cache: KVCache, bandwidth: float, work: Workload, progress: Progress) -> list[KernelRow]:
    result = []
    for context in work.contexts:
        ceiling = _step_ceiling(model, cache, context, bandwidth)
        for rows in work.rows:
            if rows == 1:
                progress(f"reply at context {context}")
                result += measure_reply(model, cache, context, ceiling)
                continue
            name = f"{rows} tokens at once at context {context}"
            progress(name)
            seconds = _median_seconds(partial(_step, model, cache, [1] * rows, context), STEPS)
            one = f"reply at context {context}"
            result.append(
                KernelRow(name, rows, seconds * 1e6, ceiling * 1e6, "a read of the weights and the cache", one)
            )
    return result


def _step_ceiling(model: Transformer, cache: KVCache, context: int, bandwidth: float) -> float:
    """Seconds of a read of what a step over `context` tokens looks at."""
    return (model.weights.read_bytes + cache.storage[..., 0, 0, :].nbytes * context) / bandwidth


def _step(model: Transformer, cache: KVCache, tokens: list[int], context: int) -> None:
    cache.length = context
    ids = torch.tensor(tokens, device=model.device)
    model.forward(ids, cache, last_only=True)[-1].numpy(force=True)


def _prompts(model: Transformer, cache: KVCache, work: Workload, progress: Progress) -> list[KernelRow]:
    result = []
    for length in work.prompts:
        name = f"prompt of {length}"
        progress(name)
        tokens = torch.ones(length, dtype=torch.int64, device=model.device)
        seconds = _median_seconds(partial(_read, model, cache, tokens), PROMPTS)
        ceiling = _prompt_ceiling(model, length)
        result.append(KernelRow(name, length, seconds * 1e6, ceiling * 1e6, "torch.mm and torch's attention"))
    return result


def _read(model: Transformer, cache: KVCache, tokens: torch.Tensor) -> None:
    cache.truncate(0)
    for chunk in torch.split(tokens, prefill_chunk(model.device)):
        model.forward(chunk, cache, last_only=True)


def _prompt_ceiling(model: Transformer, length: int) -> float:
    """Seconds of the bare products of a prompt, and of attention among its tokens, all in float16."""
    config, device = model.config, model.device
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float16)

    seconds = 0.0
    for k, n in ((hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)):
        seconds += _median_seconds(partial(torch.mm, random(length, k), random(k, n)), PRODUCTS)
    q = random(1, config.num_heads, length, config.head_dim)
    k, v = random(2, 1, config.num_kv_heads, length, config.head_dim)
    attention = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    return config.num_layers * (seconds + _median_seconds(attention, PRODUCTS))


def _median_seconds(work: Callable[[], object], count: int) -> float:
    """Median wall time of `work`, the device's work included, after two runs that warm it up."""
    seconds = []
    for _ in range(count + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[2:])
