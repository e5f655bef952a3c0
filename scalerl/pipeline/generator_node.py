"""One generator: an engine for training traces and, beside it on the same weights, one for evaluations."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.pipeline.fleet import Advance
from scalerl.recipe import Recipe, parse
from scalerl.rollout.trace import Trace, TraceRequest


class GeneratorNode:
    """Wraps an engine; lives in a Ray actor of its own, or in this process for tests."""

    def __init__(self, model_folder: str, recipe: dict[str, Any], version: int = 0, threads: int = 1) -> None:
        import torch

        torch.set_num_threads(threads)
        self.recipe: Recipe = parse(recipe, "generator")
        self._folder = Path(model_folder)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model, self._tokenizer = self._load()
        self._engine = self._make_engine(self.recipe.rollout.temperature, version, want_entropy=False)
        self._evaluation: Any = None

    def _load(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = getattr(torch, self.recipe.model.body_dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype)
        return model.to(self._device).eval(), AutoTokenizer.from_pretrained(self._folder)

    def _make_engine(self, temperature: float, version: int, want_entropy: bool) -> Any:
        from scalerl.rollout.torch_engine import TorchEngine

        rollout = self.recipe.rollout
        return TorchEngine(
            self._model,
            self._tokenizer,
            slots=rollout.slots,
            temperature=temperature,
            head_dtype=self.recipe.model.head_dtype,
            max_tokens=max_tokens(self.recipe, self._tokenizer),
            phrase=rollout.phrase,
            want_entropy=want_entropy,
            version=version,
        )

    def advance(
        self, requests: Sequence[TraceRequest], weights: Mapping[str, Any] | None, version: int, decode_steps: int
    ) -> Advance:
        """Load weights if any are given, admit requests, decode; return what finished."""
        started = time.monotonic()
        if weights is not None:
            self._engine.load_weights(weights, version)
        if requests:
            self._engine.submit(requests)
        return self._step(self._engine, decode_steps, started)

    def _step(self, engine: Any, decode_steps: int, started: float) -> Advance:
        before = engine.stats()
        traces = engine.step(decode_steps) if decode_steps else []
        after = engine.stats()
        return Advance(
            traces=traces,
            version=engine.version,
            pending=engine.pending,
            tokens_generated=after.tokens_generated - before.tokens_generated,
            busy_s=time.monotonic() - started,
            entropy_sum=after.entropy_sum - before.entropy_sum,
            entropy_tokens=after.entropy_tokens - before.entropy_tokens,
        )

    def unfinished(self) -> list[Trace]:
        """Return the unfinished training traces in submit order."""
        return self._engine.unfinished()

    def rebuild(self) -> None:
        """Drop the caches of the training traces and compute them from tokens with the current weights."""
        self._engine.rebuild()

    def drop(self, group_ids: Sequence[int]) -> None:
        """Forget the unfinished traces of these groups."""
        self._engine.drain(group_ids)

    def start_evaluation(
        self, requests: Sequence[TraceRequest], weights: Mapping[str, Any] | None, version: int
    ) -> None:
        """Begin an evaluation with the given (or the present) weights; training traces wait with their caches kept."""
        if weights is not None:
            self._engine.load_weights(weights, version)
        # A new engine each time: its fp32 head is a copy of the weights as they are now.
        self._evaluation = self._make_engine(
            self.recipe.evaluation.temperature, self._engine.version, want_entropy=True
        )
        self._evaluation.submit(requests)

    def advance_evaluation(self, decode_steps: int) -> Advance:
        """Decode evaluation traces; return what finished."""
        return self._step(self._evaluation, decode_steps, time.monotonic())

    def ping(self) -> bool:
        """Answer, so that a caller knows the model is loaded."""
        return True


def max_tokens(recipe: Recipe, tokenizer: Any) -> int:
    """Return the longest sequence: prompt, thinking, the interruption phrase, answer."""
    phrase = len(tokenizer.encode(recipe.rollout.phrase, add_special_tokens=False))
    rollout = recipe.rollout
    return recipe.data.longest_prompt + rollout.think_hi + phrase + rollout.answer_tokens
