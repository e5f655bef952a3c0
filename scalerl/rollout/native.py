"""The attention kernel in C, built when an engine starts on a machine that has a C compiler; without one the engine uses torch."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch

# Sums may be reordered (vector registers), but NaN stays NaN: non-finite weights must not go unnoticed.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_BUILD_DEADLINE_S = 60

# Called with (fused, (cos, sin), keys, values, positions, scores, out, scale); see `_call`.
Kernel = Callable[..., None]


@functools.cache
def attention_kernel() -> Kernel | None:
    """Return the kernel, built once per process, or None where there is no C compiler or it refuses (half a second)."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="scalerl-") as folder:
        source, library = Path(folder, "attention.c"), Path(folder, "attention.so")
        source.write_text(resources.files("scalerl.rollout").joinpath("attention.c").read_text())
        command = [compiler, *_FLAGS, "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
        try:
            built = subprocess.run(command, capture_output=True, timeout=_BUILD_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return None
        if built.returncode != 0:
            return None
        function = ctypes.CDLL(str(library)).decode_attention  # stays mapped when the file is gone
    function.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 5 + [ctypes.c_float]
    function.restype = None
    return functools.partial(_call, function)


def _call(
    function: Callable[..., None],
    fused: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Run the kernel on contiguous tensors: fused [n, heads + 2 kv_heads, dim], stores [slots, kv_heads, capacity, dim], out [n, heads, dim]."""
    rows, heads, dim = out.shape
    _, kv_heads, capacity, _ = keys.shape
    tensors = (fused, *tables, keys, values, positions, scores, out)
    function(*(tensor.data_ptr() for tensor in tensors), rows, heads, kv_heads, dim, capacity, scale)
