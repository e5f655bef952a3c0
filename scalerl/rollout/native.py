"""Kernels in C, built when an engine starts on a machine that has a C compiler; without one the engine uses torch."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
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


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "width", "heads", "kv_heads", "dim", "inner", "capacity")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class DecodeStep:
    """The functions of decode_step.c on contiguous float32 tensors of the CPU: a whole decode step, and drawing its tokens."""

    def __init__(self, library: ctypes.CDLL):
        """Declare the arguments."""
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._scratch_floats, self._read, self._draw = library.scratch_floats, library.read_tokens, library.draw
        self._scratch_floats.argtypes, self._scratch_floats.restype = [ctypes.POINTER(_Shape)], size
        self._read.argtypes = [ctypes.POINTER(_Shape), *[pointer] * 8, size, *[pointer] * 2]
        self._draw.argtypes = [*[pointer] * 2, *[size] * 2, ctypes.c_float, *[pointer] * 4]
        self._huge_pages = library.use_huge_pages
        self._huge_pages.argtypes = [pointer, size]
        self._read.restype = self._draw.restype = self._huge_pages.restype = None
        self._scratch = torch.empty(0)

    def read(
        self,
        shape: tuple[int, int, int, int, int, int, int, float, float],
        layers: Sequence[Sequence[torch.Tensor]],
        tables: Sequence[torch.Tensor],
        rows: Sequence[np.ndarray],
        want_hidden: bool,
    ) -> torch.Tensor | None:
        """Read one token per row into its slot's cache; returns hidden states [n, width] if wanted.

        shape: layers, width, heads, kv heads, head dim, inner width, capacity, epsilon, scale of scores. layers: per layer input norm, fused
        query/key/value, output, MLP norm, fused gate/up, down, store (its layout is in decode_step.c). tables: embedding, last norm, cos, sin. rows: tokens, slots,
        positions, each int64 [n]; rows of one slot in order of position.
        """
        sizes = _Shape(*shape)
        needed = self._scratch_floats(sizes)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed)
        pointers = np.array([[tensor.data_ptr() for tensor in layer] for layer in layers], np.uintp)
        columns = [np.ascontiguousarray(column, np.int64) for column in rows]
        count = len(columns[0])
        hidden = torch.empty(count, shape[1]) if want_hidden else None
        self._read(
            sizes,
            pointers.ctypes.data,
            *(table.data_ptr() for table in tables),
            *(column.ctypes.data for column in columns),
            count,
            self._scratch.data_ptr(),
            None if hidden is None else hidden.data_ptr(),
        )
        return hidden

    def use_huge_pages(self, fresh: torch.Tensor) -> None:
        """Ask for huge pages under a tensor that nothing has been written to; changes no value."""
        self._huge_pages(fresh.data_ptr(), fresh.numel() * fresh.element_size())

    def draw(
        self, logits: torch.Tensor, temperature: float, uniforms: np.ndarray, want_entropy: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Do what `sampling.sample` does at a temperature above 0, in one pass over logits [n, vocabulary]."""
        rows, vocabulary = logits.shape
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
        entropy = np.empty(rows, np.float32) if want_entropy else None
        scratch, numbers = np.empty(2 * vocabulary), np.ascontiguousarray(uniforms, np.float64)
        self._draw(
            logits.contiguous().data_ptr(),
            numbers.ctypes.data,
            rows,
            vocabulary,
            temperature,
            *(array.ctypes.data for array in (scratch, tokens, logprobs)),
            None if entropy is None else entropy.ctypes.data,
        )
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("the model's logits are not finite; load weights that are")
        return tokens, logprobs, entropy


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels, built once per process, or None where there is no C compiler or it refuses (half a second)."""
    library = _built("kernels.c")
    return None if library is None else Kernels(library)


@functools.cache
def decode_step() -> DecodeStep | None:
    """Return the decode step, built once per process, or None where there is no C compiler or it refuses (two seconds)."""
    library = _built("decode_step.c")
    return None if library is None else DecodeStep(library)


def _built(name: str) -> ctypes.CDLL | None:
    """Build and load a C file that lies beside this one."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="scalerl-") as folder:
        source, library = Path(folder, name), Path(folder, "library.so")
        for part in (name, "exp_negative.h"):
            Path(folder, part).write_text(resources.files("scalerl.rollout").joinpath(part).read_text())
        command = [compiler, *_FLAGS, "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
        try:
            built = subprocess.run(command, capture_output=True, timeout=_BUILD_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return None
        return ctypes.CDLL(str(library)) if built.returncode == 0 else None  # stays mapped when the file is gone
