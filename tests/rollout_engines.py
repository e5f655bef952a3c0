"""Both engines behind one maker, for the tests that every engine has to pass.

A test module takes the fixtures by name: `make, vllm_maker = rollout_engines.make, rollout_engines.vllm_maker`.
"""

import copy
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rollout_models
import torch
from rollout_models import character_tokenizer, state

from scalerl.data import arithmetic
from scalerl.rollout.engine import Engine
from scalerl.rollout.interruption import phrase_ids

WITHOUT_VLLM = "vLLM is not installed: `make vllm` adds it"
# vLLM's kernels for CPUs read heads of 32 elements and more.
SHAPE = {"width": 64, "heads": 2}
KINDS = [
    "torch",
    pytest.param(
        "vllm",
        marks=[pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=WITHOUT_VLLM)],
    ),
]
# A vLLM that hangs is a failed test with its stack; later tests then fail at once.
START_DEADLINE_S, CALL_DEADLINE_S = 300.0, 180.0
Make = Callable[..., Engine]


def torch_maker(model: Any, tokenizer: Any = None, **options: Any) -> Engine:
    """A TorchEngine on a copy of the model."""
    return rollout_models.engine(model, tokenizer, **options)


class VllmMaker:
    """Makes VllmEngines; a core serves as many tests as want one of its kind, because a process can hold one at a time."""

    def __init__(self) -> None:
        self._core: Any = None
        self._key: Any = None
        self._engines: list[Any] = []
        self._hung = ""

    def __call__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        slots: int = 8,
        max_tokens: int = 64,
        temperature: float = 0.8,
        head_dtype: str = "float32",
        phrase: str = arithmetic.PHRASE,
        version: int = 0,
        lane: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> Engine:
        from scalerl.rollout.vllm_core import TRAIN, VllmOptions
        from scalerl.rollout.vllm_engine import VllmEngine

        tokenizer = tokenizer or character_tokenizer()
        dtype = str(model.dtype).removeprefix("torch.")
        options = VllmOptions(
            slots,
            max_tokens,
            phrase_ids(tokenizer, phrase),
            dtype,
            head_dtype,
            start_deadline_s=START_DEADLINE_S,
            call_deadline_s=CALL_DEADLINE_S,
        )
        key = (model.config.to_json_string(), dtype, tuple(sorted(tokenizer.get_vocab().items())), options)
        for engine in self._engines if lane is None else []:
            engine.drain({trace.request.group_id for trace in engine.unfinished()})
        if key == self._key:
            if lane is None:
                self._core.load_arrays(state(model), version)
        else:
            self._start(model, tokenizer, options, key, version)
        engine = VllmEngine(self._core, tokenizer, temperature=temperature, lane=lane or TRAIN, stop=stop)
        self._engines = [engine] if lane is None else [*self._engines, engine]
        return engine

    def _start(self, model: Any, tokenizer: Any, options: Any, key: Any, version: int) -> None:
        from scalerl.rollout.deadline import EngineLost
        from scalerl.rollout.vllm_core import VllmCore

        if self._hung:
            pytest.fail(f"vLLM has hung in this process before: {self._hung}")
        try:
            self.close()
            self._folder = Path(tempfile.mkdtemp(prefix="vllm-test-"))
            # Of a copy: saving writes into the model's configuration, and the key would no longer be found.
            copy.deepcopy(model).save_pretrained(self._folder)
            tokenizer.save_pretrained(self._folder)
            self._core, self._key = VllmCore(self._folder, options, version), key
        except EngineLost as error:
            self._hung = str(error)
            raise

    def close(self) -> None:
        """End the core, if there is one."""
        core, self._core, self._key, self._engines = self._core, None, None, []
        if core is not None:
            shutil.rmtree(self._folder)
            core.close()


@pytest.fixture(scope="module")
def vllm_maker() -> Iterator[VllmMaker]:
    """One maker for a module's tests, ended after the last of them."""
    maker = VllmMaker()
    yield maker
    maker.close()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    """The maker of each engine in turn."""
    torch.set_num_threads(1)
    return torch_maker if request.param == "torch" else request.getfixturevalue("vllm_maker")


def same_model(model: Any, scale: float) -> Any:
    """A copy of the model with all weights multiplied."""
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(scale)
    return scaled
