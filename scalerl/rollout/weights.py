"""Published weights as arrays: what an engine checks before it takes them, and how bf16 travels in NumPy."""

import warnings
from collections.abc import Mapping

import numpy as np
import torch


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor on the array's memory; uint16 is bf16 seen as bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only arrays from the object store are only read here
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def check_state(
    state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], version: int
) -> None:
    """Raise ValueError where names or shapes differ from the model's.

    shapes: of all the model's parameters by name. aliases: names of the same parameter -> the first of them (a tied head); one of them is enough.
    """
    unknown = sorted(set(state) - set(shapes))
    given = {aliases.get(name, name) for name in state}
    missing = sorted(name for name in shapes if aliases.get(name, name) not in given)
    if unknown or missing:
        raise ValueError(f"weights of version {version}: unknown {unknown[:3]}, missing {missing[:3]}")
    for name, array in state.items():
        if tuple(shapes[name]) != array.shape:
            raise ValueError(f"weights of version {version}: {name} has shape {array.shape}, not {tuple(shapes[name])}")
