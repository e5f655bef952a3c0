"""One generator: an engine for training traces and, beside it on the same weights, one for evaluations.

The recipe chooses the engine: TorchEngine for any transformers model, VllmEngine where vLLM is installed. An engine that hangs makes the generator lost, like one
that died.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scalerl.pipeline.collector import spare_what_is_there
from scalerl.pipeline.fleet import Advance, GeneratorLost
from scalerl.recipe import Recipe, parse
from scalerl.rollout.channel_errors import ChannelLost
from scalerl.rollout.columns import TraceList
from scalerl.rollout.deadline import EngineLost
from scalerl.rollout.engine import Engine
from scalerl.rollout.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from scalerl.rollout.vllm_core import VllmOptions

# Of a caller's deadline: the engine's own answer, which says what hung, should come first.
EARLIER = 0.9


class EngineMaker(Protocol):
    """Makes an engine on the generator's weights: for training traces, or for an evaluation beside them, at its own temperature if one is given."""

    def __call__(self, evaluation: bool, temperature: float | None = None) -> Engine:
        """Return the engine."""


class GeneratorNode:
    """Wraps an engine; lives in a Ray actor of its own, or in this process for tests."""

    def __init__(self, model_folder: str, recipe: dict[str, Any], version: int = 0, threads: int = 1) -> None:
        import torch

        torch.set_num_threads(threads)
        self.recipe: Recipe = parse(recipe, "generator")
        self._folder = Path(model_folder)
        self._engines = self._vllm(version) if self.recipe.rollout.engine == "vllm" else self._torch(version)
        self._engine = self._engines(False)
        self._evaluation: Engine | None = None
        self._lost = ""
        self._load_s = 0.0

    def _torch(self, version: int) -> "EngineMaker":
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from scalerl.rollout.torch_engine import TorchEngine

        recipe, rollout = self.recipe, self.recipe.rollout
        dtype = getattr(torch, recipe.model.body_dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        tokenizer = AutoTokenizer.from_pretrained(self._folder)

        def make(evaluation: bool, temperature: float | None = None) -> Engine:
            # A new engine each time: its fp32 head is a copy of the weights as they are now.
            return TorchEngine(
                model,
                tokenizer,
                slots=rollout.slots,
                temperature=_temperature(recipe, evaluation, temperature),
                head_dtype=recipe.model.head_dtype,
                max_tokens=max_tokens(recipe, tokenizer),
                phrase=rollout.phrase,
                stop=rollout.stop,
                want_entropy=evaluation,
                version=self._engine.version if evaluation else version,
            )

        return make

    def _vllm(self, version: int) -> "EngineMaker":
        from scalerl.rollout.vllm_core import EVALUATION, TRAIN, VllmCore, require_vllm
        from scalerl.rollout.vllm_engine import VllmEngine

        require_vllm()
        recipe, tokenizer, options = self.recipe, *vllm_options(self.recipe, self._folder)
        with _lost_together():
            core = VllmCore(self._folder, options, version)

        def make(evaluation: bool, temperature: float | None = None) -> Engine:
            lane = EVALUATION if evaluation else TRAIN
            return VllmEngine(
                core,
                tokenizer,
                temperature=_temperature(recipe, evaluation, temperature),
                lane=lane,
                stop=recipe.rollout.stop,
            )

        return make

    def advance(
        self, requests: Sequence[TraceRequest], weights: Mapping[str, Any] | None, version: int, decode_steps: int
    ) -> Advance:
        """Load weights if any are given, admit requests, decode; return what finished."""
        started = time.monotonic()
        if self._lost:
            raise GeneratorLost(self._lost)
        with _lost_together():
            if weights is not None:
                self._load(weights, version)
            if requests:
                self._engine.submit(requests)
            advance = self._step(self._engine, decode_steps, started)
        advance.load_s, self._load_s = self._load_s, 0.0
        return advance

    def _load(self, weights: Mapping[str, Any], version: int) -> None:
        started = time.monotonic()
        self._engine.load_weights(weights, version)
        self._load_s += time.monotonic() - started

    def _step(self, engine: Engine, decode_steps: int, started: float) -> Advance:
        before = engine.stats()
        traces = engine.step(decode_steps) if decode_steps else []
        after = engine.stats()
        return Advance(
            traces=TraceList(traces),
            version=engine.version,
            pending=engine.pending,
            tokens_generated=after.tokens_generated - before.tokens_generated,
            busy_s=time.monotonic() - started,
            entropy_sum=after.entropy_sum - before.entropy_sum,
            entropy_tokens=after.entropy_tokens - before.entropy_tokens,
        )

    def join_channel(self, meeting: str, rank_offset: int, world_size: int) -> None:
        """Join the trainer's weight channel with this generator's workers, from `rank_offset` on; see `scalerl.pipeline.broadcast`."""
        with _lost_together():
            self._engine.join_channel(
                meeting, rank_offset, world_size, EARLIER * self.recipe.execution.advance_deadline_s
            )

    def receive(self, version: int) -> None:
        """Take the weights that the trainer sends as `version`; where that fails this generator is lost, whoever asks next."""
        started = time.monotonic()
        try:
            self._engine.receive_weights(version)
            self._load_s += time.monotonic() - started
        except (ChannelLost, EngineLost) as error:
            self._lost = str(error)

    def unfinished(self) -> list[Trace]:
        """Return the unfinished training traces in submit order."""
        return self._engine.unfinished()

    def rebuild(self) -> None:
        """Drop the caches of the training traces and compute them from tokens with the current weights."""
        with _lost_together():
            self._engine.rebuild()

    def drop(self, group_ids: Sequence[int]) -> None:
        """Forget the unfinished traces of these groups."""
        with _lost_together():
            self._engine.drain(group_ids)

    def start_evaluation(
        self,
        requests: Sequence[TraceRequest],
        weights: Mapping[str, Any] | None,
        version: int,
        temperature: float | None = None,
    ) -> None:
        """Begin an evaluation with the given (or the present) weights; training traces wait with their caches kept.

        `temperature` None takes the recipe's of evaluations.
        """
        if self._lost:
            raise GeneratorLost(self._lost)
        with _lost_together():
            if weights is not None:
                self._load(weights, version)
            self._evaluation = self._engines(True, temperature)
            self._evaluation.submit(requests)

    def advance_evaluation(self, decode_steps: int) -> Advance:
        """Decode evaluation traces; return what finished."""
        if self._evaluation is None:
            raise RuntimeError("no evaluation has been started")
        with _lost_together():
            return self._step(self._evaluation, decode_steps, time.monotonic())

    def ping(self) -> bool:
        """Answer, so that a caller knows the model is loaded; the first question that a fleet asks of a process of its own."""
        spare_what_is_there()
        return True


def _temperature(recipe: Recipe, evaluation: bool, given: float | None) -> float:
    if given is not None:
        return given
    return recipe.evaluation.temperature if evaluation else recipe.rollout.temperature


@contextmanager
def _lost_together() -> Iterator[None]:
    """An engine that is lost takes its generator along."""
    try:
        yield
    except (ChannelLost, EngineLost) as error:
        raise GeneratorLost(str(error)) from error


def vllm_options(recipe: Recipe, folder: Path) -> tuple[Any, "VllmOptions"]:
    """Return the checkpoint's tokenizer and what a recipe asks of vLLM; on GPUs a generator's devices share each layer (tensor parallelism)."""
    import torch
    from transformers import AutoTokenizer

    from scalerl import streams
    from scalerl.rollout.interruption import phrase_ids
    from scalerl.rollout.vllm_core import VllmOptions

    tokenizer = AutoTokenizer.from_pretrained(folder)
    execution = recipe.execution
    return tokenizer, VllmOptions(
        slots=recipe.rollout.slots,
        max_tokens=max_tokens(recipe, tokenizer),
        phrase=phrase_ids(tokenizer, recipe.rollout.phrase),
        body_dtype=recipe.model.body_dtype,
        head_dtype=recipe.model.head_dtype,
        seed=streams.key(recipe.seed, "vllm") % 2**31,
        tensor_parallel=max(1, int(recipe.resources.generator_devices)) if torch.cuda.is_available() else 1,
        start_deadline_s=EARLIER * execution.start_deadline_s,
        call_deadline_s=EARLIER * execution.advance_deadline_s,
    )


def max_tokens(recipe: Recipe, tokenizer: Any) -> int:
    """Return the longest sequence: prompt, thinking, the interruption phrase, answer."""
    phrase = len(tokenizer.encode(recipe.rollout.phrase, add_special_tokens=False))
    rollout = recipe.rollout
    return recipe.data.longest_prompt + rollout.think_hi + phrase + rollout.answer_tokens
