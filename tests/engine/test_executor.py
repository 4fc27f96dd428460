"""Steps over pages against the same tokens over caches of their own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl2chat.engine.cache import PAGE
from exl2chat.engine.executor import Executor
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.progress import silent

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LONG, SHORT = 300, 20


def step(*, copies: tuple[PageCopy, ...] = (), prefill: tuple[Row, ...] = (), decode: tuple[Row, ...] = ()) -> StepPlan:
    return StepPlan(copies, (), (), prefill, decode)


def text(count: int, seed: int) -> list[int]:
    return torch.randint(4, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: Transformer, tokens: list[int]) -> torch.Tensor:
    return model.forward(torch.tensor(tokens), model.new_cache(512), last_only=True)[0]


@pytest.fixture(params=["llama-6.0bpw-exl2", "gemma2-4.0bpw-exl2", "mistral-4.0bpw-exl2", "phi3-4.0bpw-exl2"])
def model(request: pytest.FixtureRequest) -> Transformer:
    """With windows and soft caps among them."""
    return Transformer.load(open_checkpoint(GOLDEN / request.param), torch.device("cpu"), torch.float32, silent)


def test_sequences_in_scattered_pages_compute_what_they_would_alone(model: Transformer) -> None:
    """A text over two pages that are apart and in the wrong order, and one in a page, read and decoded in one step."""
    cache = model.new_cache(4 * PAGE)
    cache.storage.fill_(float("nan"))
    executor = Executor(model, cache, 200)
    assert executor.pages == 4
    long, short = text(LONG, 1), text(SHORT, 2)
    executor.run(step(prefill=(Row(0, 0, 0, tuple(long[:200]), (3, 1)), Row(1, 0, 0, tuple(short[:-1]), (2,)))), {})
    executor.run(step(prefill=(Row(0, 0, 200, tuple(long[200:-1]), (3, 1)),)), {})
    decode = (Row(0, 0, LONG - 1, (long[-1],), (3, 1)), Row(1, 0, SHORT - 1, (short[-1],), (2,)))
    logits = torch.cat([*executor.run(step(decode=decode), {}).rows])
    expected = torch.stack((alone(model, long), alone(model, short)))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_copies_come_first(model: Transformer) -> None:
    cache = model.new_cache(3 * PAGE)
    executor = Executor(model, cache, 200)
    start, end = text(30, 3), text(2, 4)
    executor.run(step(prefill=(Row(0, 0, 0, tuple(start), (0,)),)), {})
    executor.run(step(copies=(PageCopy(0, 2, 25), PageCopy(2, 1, 25)), prefill=(Row(1, 0, 25, (end[0],), (1,)),)), {})
    logits = executor.run(step(decode=(Row(1, 0, 26, (end[1],), (1,)),)), {}).logits(0)[0]
    expected = alone(model, start[:25] + end)
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_a_step_of_prompts_has_no_logits(model: Transformer) -> None:
    computed = Executor(model, model.new_cache(PAGE), 200).run(step(prefill=(Row(0, 0, 0, (5, 6), (0,)),)), {})
    assert not computed.rows


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_a_quantised_cache_holds_what_it_would_for_one_sequence(model: Transformer, bits: int) -> None:
    """In pages that are apart, with a copy of a part of one that ends within a tile, and drafts behind a last token."""
    model = replace(model, cache_bits=bits)
    cache = model.new_cache(4 * PAGE)
    cache.storage.fill_(255)
    executor = Executor(model, cache, 200)
    long, short = text(LONG, 1), text(SHORT, 2)
    both = (Row(0, 0, 0, tuple(long[:-3]), (3, 1)), Row(1, 0, 0, tuple(short[:-1]), (2,)))
    executor.run(step(prefill=both), {})
    copies = (PageCopy(1, 0, LONG - PAGE - 3),)
    rows = (Row(0, 0, LONG - 3, tuple(long[-3:]), (3, 0)), Row(1, 0, SHORT - 1, (short[-1],), (2,)))
    found = torch.cat([*executor.run(step(copies=copies, decode=rows), {}).rows])
    expected = torch.cat([last_rows(model, long, 3), last_rows(model, short, 1)])
    assert (found - expected).norm() < {8: 1e-3, 6: 2e-2, 4: 5e-2}[bits] * expected.norm()  # codes on an edge


def last_rows(model: Transformer, tokens: list[int], count: int) -> torch.Tensor:
    """The logits of the last tokens of a text that is alone in its cache."""
    cache = model.new_cache(512)
    model.forward(torch.tensor(tokens[:-count]), cache, last_only=True)
    return model.forward(torch.tensor(tokens[-count:]), cache)
