"""Named random streams: every random choice is a function of the recipe's seed and of what it is for.

Two forms. `generator` gives a NumPy generator for choices made in order (shuffles, initial weights). `uniforms` is counter-based: the
number at a position needs no state, so a trace that is saved half-way and resumed elsewhere draws the same numbers.
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key(seed: int, *names: str | int) -> int:
    """Return a 64-bit key that depends on the seed and every name, in order (SHA-256 of their joined text)."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """Return the NumPy generator of a named stream."""
    return np.random.Generator(np.random.PCG64(key(seed, *names)))


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014), element by element on uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) per pair of key (uint64, shape [N]) and position (integer, shape [N]), as float64 [N].

    SplitMix64 in counter mode, mixed twice so that neighbouring keys share nothing.
    """
    with np.errstate(over="ignore"):
        state = _mix(keys.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(_mix(state))
    return (bits >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))
