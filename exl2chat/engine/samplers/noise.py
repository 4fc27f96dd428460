"""The randomness of a draw: a hash of seed, absolute position and token id, the same on every machine."""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NO_TOKEN = np.array([2**64 - 1], np.uint64)  # an id that no token has: the position's own number


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise [n] for token `ids` [n] at an absolute `position`, a function of its arguments alone."""
    noise = _uniform(seed, position, ids.astype(np.uint64))
    for _ in range(2):
        np.negative(np.log(noise, out=noise), out=noise)
    return noise


def coin(seed: int, position: int) -> float:
    """A number from (0, 1) for an absolute `position`, independent of the noise of every token there."""
    return float(_uniform(seed, position, NO_TOKEN)[0])


def _uniform(seed: int, position: int, ids: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers [n] from (0, 1).

    Output number `id` of the SplitMix64 stream (Steele et al. 2014) whose seed is output number `position` of the
    stream of `seed`: its upper 52 bits and a half. With 53 the largest would round to 1, its Gumbel noise to infinity.
    """
    key = _splitmix(np.array([seed], np.uint64), np.array([position], np.uint64))
    uniform = (_splitmix(key, ids) >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return uniform


def _splitmix(seed: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Outputs number `index` of the SplitMix64 stream of `seed`, modulo 2^64."""
    z: NDArray[np.uint64] = seed + (index + np.uint64(1)) * GOLDEN
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
