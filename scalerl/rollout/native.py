"""Kernels in C, built when an engine starts on a machine that has a C compiler; without one the engine uses torch."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import torch

# Sums may be reordered (vector registers), but NaN stays NaN: non-finite weights must not go unnoticed.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_BUILD_DEADLINE_S = 60


class Kernels:
    """The functions of kernels.c on contiguous float32 tensors of the CPU."""

    # Largest head that the attention has room for (MAX_DIM).
    max_head_dim = 256

    def __init__(self, library: ctypes.CDLL):
        """Declare the arguments: pointers, sizes, a factor."""
        self._attention, self._rms_norm, self._swiglu = library.decode_attention, library.rms_norm, library.swiglu
        for function, pointers, sizes in ((self._attention, 8, 5), (self._rms_norm, 3, 2), (self._swiglu, 2, 2)):
            function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes + [ctypes.c_float]
            function.restype = None
        self._swiglu.argtypes = self._swiglu.argtypes[:-1]

    def attention(
        self,
        fused: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store and attend to one new token per slot; returns [n, heads * dim].

        fused [n, heads + 2 kv_heads, dim] (queries, keys, values; rotated in place), angles: cos and sin [positions, dim], stores
        [slots, kv_heads, capacity, dim], positions int64 [n], scores: scratch of at least capacity.
        """
        _, kv_heads, capacity, dim = keys.shape
        rows, heads = fused.shape[0], fused.shape[1] - 2 * kv_heads
        out = torch.empty(rows, heads * dim)
        tensors = (fused, *angles, keys, values, positions, scores, out)
        self._attention(*(tensor.data_ptr() for tensor in tensors), rows, heads, kv_heads, dim, capacity, scale)
        return out

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square normalisation of [n, width]."""
        out = torch.empty_like(hidden)
        self._rms_norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), *hidden.shape, eps)
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of [n, 2 * width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels, built once per process, or None where there is no C compiler or it refuses (half a second)."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="scalerl-") as folder:
        source, library = Path(folder, "kernels.c"), Path(folder, "kernels.so")
        source.write_text(resources.files("scalerl.rollout").joinpath("kernels.c").read_text())
        command = [compiler, *_FLAGS, "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
        try:
            built = subprocess.run(command, capture_output=True, timeout=_BUILD_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return None
        return (
            Kernels(ctypes.CDLL(str(library))) if built.returncode == 0 else None
        )  # stays mapped when the file is gone
