"""kernels/sample.cu against the sampler of the host, engine/sampler.py: the same token for the same logits."""

import math
import random

import msgspec
import numpy as np
import pytest
import torch

from exl2chat.engine.device_penalties import count_window
from exl2chat.engine.device_steps import RESULTS, sampling_row
from exl2chat.engine.sampler import Sampler
from exl2chat.ops.sample import TokenSampler
from exl2chat.settings import Sampling

CUDA = torch.device("cuda")
ROWS = 64


class Rows:
    """Sequences on the device, one a row, without a model."""

    def __init__(self, settings: list[Sampling], prompts: list[list[int]], vocabulary: int, longest: int = 64) -> None:
        count = len(settings)
        self.vocabulary = vocabulary
        self.position = torch.tensor([len(prompt) - 1 for prompt in prompts], dtype=torch.int32, device=CUDA)
        self.token = torch.full((count,), -7, dtype=torch.int64, device=CUDA)
        self.results = torch.full((count, RESULTS), -7, dtype=torch.int32, pin_memory=True)
        self.windows = [
            count_window(torch.tensor(prompt, device=CUDA), one.penalty_range, one.penalty_decay, vocabulary, longest)
            for one, prompt in zip(settings, prompts, strict=True)
        ]
        self.sampler = TokenSampler(CUDA, vocabulary, count)
        self.sampler.set_rows(np.concatenate([self._row(i, one) for i, one in enumerate(settings)]))

    def _row(self, index: int, settings: Sampling) -> np.ndarray:
        tensors = {"position": self.position[index], "token": self.token[index], "results": self.results[index]}
        penalized = settings.repetition_penalty != 1 or settings.presence_penalty or settings.frequency_penalty
        if penalized:
            tensors |= self.windows[index]._asdict()
        return sampling_row(settings, self.vocabulary, tensors)

    def draw(self, logits: np.ndarray) -> list[int]:
        """The tokens of logits [rows, V or more]: by the next step's and by the host's memory."""
        self.sampler.queue(torch.from_numpy(logits).to(CUDA))
        torch.cuda.synchronize()
        slots = self.position.cpu() % RESULTS
        tokens = self.results[torch.arange(len(slots)), slots].tolist()
        assert self.token.tolist() == [max(token, 0) for token in tokens]
        return tokens


def some_logits(rng: np.random.Generator, size: int) -> np.ndarray:
    """Logits of many shapes: flat, peaked, with ties, with tokens that are ruled out, all equal, of any magnitude."""
    logits = rng.standard_normal(size) * rng.choice([0.1, 1, 3, 8]) + rng.choice([0, 0, -20, 3e3])
    match rng.integers(8):
        case 0:
            logits[rng.integers(size, size=3)] += 15
        case 1:
            logits = np.round(logits * 4) / 4
        case 2:
            logits[rng.random(size) < 0.9] = -np.inf
            logits[rng.integers(size)] = 1
        case 3:
            logits[:] = rng.standard_normal()
        case 4:
            logits = np.sort(logits)
        case 5:
            logits = np.where(rng.random(size) < 0.5, 0.0, -0.0)
    return logits.astype(np.float32)


def some_settings(chance: random.Random, vocabulary: int) -> Sampling:
    return Sampling(
        temperature=chance.choice([0, 1e-6, 0.05, 0.3, 0.8, 0.8, 1, 1.5, 10]),
        top_k=chance.choice([0, 0, 1, 2, 20, 50, 300, vocabulary - 1, vocabulary, 10**6]),
        top_p=chance.choice([1, 1, 0.95, 0.95, 0.5, 0.1, 0, 0.999999]),
        min_p=chance.choice([0, 0, 0, 0.05, 0.5, 1]),
        repetition_penalty=chance.choice([1, 1, 1, 1.2, 0.7]),
        frequency_penalty=chance.choice([0, 0, 0, 0.3, -1]),
        presence_penalty=chance.choice([0, 0, 0, 0.7, -0.2]),
        penalty_range=chance.choice([-1, -1, 0, 5, 20]),
        penalty_decay=chance.choice([0, 0, 3, 17]),
        seed=chance.getrandbits(63),
    )


@pytest.mark.parametrize("vocabulary", [2, 257, 1024, 4099, 32000, 128256])
def test_tokens_are_those_of_the_host(vocabulary: int) -> None:
    chance, rng = random.Random(vocabulary), np.random.default_rng(vocabulary)
    for _ in range(10 if vocabulary > 10**4 else 20):
        settings = [some_settings(chance, vocabulary) for _ in range(ROWS)]
        prompts = [[chance.randrange(vocabulary) for _ in range(chance.randint(1, 40))] for _ in range(ROWS)]
        logits = np.stack([some_logits(rng, vocabulary) for _ in range(ROWS)])
        drawn = Rows(settings, prompts, vocabulary).draw(logits)
        for one, prompt, row, token in zip(settings, prompts, logits, drawn, strict=True):
            assert token == Sampler(one, prompt).sample(row, len(prompt)), one


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(17, 1, 0), (0, 0.6, 0), (40, 0.5, 0), (0, 1, 0.8), (60, 0.9, 0.9)]
)
def test_the_last_candidate_is_drawn_and_the_next_is_not(top_k: int, top_p: float, min_p: float) -> None:
    """Flat logits make all candidates about as likely: 2560 draws miss few of them."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(200) * 0.1).astype(np.float32)
    common = Sampling(temperature=1, top_k=top_k, top_p=top_p, min_p=min_p)
    for start in range(0, 40 * ROWS, ROWS):
        settings = [msgspec.structs.replace(common, seed=seed) for seed in range(start, start + ROWS)]
        drawn = Rows(settings, [[0]] * ROWS, 200).draw(np.tile(logits, (ROWS, 1)))
        assert drawn == [Sampler(one, [0]).sample(logits, 1) for one in settings]


@pytest.mark.parametrize(("reach", "decay"), [(-1, 0), (0, 5), (3, 0), (4, 6), (7, 30)])
def test_penalties_follow_the_tokens_that_were_drawn(reach: int, decay: int) -> None:
    vocabulary, rng = 30, np.random.default_rng(2)
    settings = [
        Sampling(
            temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6,
            penalty_range=reach, penalty_decay=decay, seed=seed,
        )
        for seed in range(ROWS)
    ]  # fmt: skip
    prompts = [rng.integers(vocabulary, size=rng.integers(1, 20)).tolist() for _ in range(ROWS)]
    rows = Rows(settings, prompts, vocabulary)
    hosts = [Sampler(one, prompt) for one, prompt in zip(settings, prompts, strict=True)]
    for step in range(40):
        logits = (rng.standard_normal((ROWS, vocabulary)) * 2).astype(np.float32)
        drawn = rows.draw(logits)
        for host, prompt, row, token in zip(hosts, prompts, logits, drawn, strict=True):
            assert token == host.sample(row, len(prompt) + step)
            host.observe(token)


@pytest.mark.parametrize("fault", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_numbers_are_told(fault: float, temperature: float) -> None:
    rng = np.random.default_rng(3)
    rows = Rows([Sampling(temperature=temperature, seed=5)] * 3, [[0]] * 3, 5000)
    logits = rng.standard_normal((3, 5000)).astype(np.float32)
    faulty = logits.copy()
    faulty[0, 4321], faulty[2] = fault, -np.inf
    host = Sampler(Sampling(temperature=temperature, seed=5), [0])
    assert rows.draw(faulty) == [-1, host.sample(logits[1], 1), -1]
    assert rows.draw(logits) == [host.sample(row, 2) for row in logits]


def test_logits_of_wider_rows() -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((3, 1056)).astype(np.float32)
    logits[:, 1000:] = 50
    settings = Sampling(seed=1)
    expected = [Sampler(settings, [0]).sample(row[:1000], 1) for row in logits]
    assert Rows([settings] * 3, [[0]] * 3, 1000).draw(logits) == expected


def test_a_draw_is_the_same_a_hundred_times() -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((1, 128256)).astype(np.float32)
    settings = [Sampling(temperature=1, top_p=0.9, top_k=30000, seed=9)]
    tokens = {Rows(settings, [[0]], 128256).draw(logits)[0] for _ in range(100)}
    assert len(tokens) == 1
