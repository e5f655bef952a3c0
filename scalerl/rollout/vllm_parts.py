"""What runs inside vLLM: the interruption, the scheduler that keeps two lanes apart, and how new weights get in.

vLLM loads these by name, also in the worker processes of tensor parallelism, so each finds all it needs in vLLM's configuration and in the request.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from scalerl.rollout import weight_channel
from scalerl.rollout.follower import ThinkFollower
from scalerl.rollout.interruption import transition_table
from scalerl.rollout.weights import tensor_of

# Name under which vLLM knows the transfer below.
TRANSFER = "scalerl"
# Keys of `additional_config` and of a request's `extra_args`.
PHRASE, THINK = "scalerl_phrase", "scalerl_think"


@dataclass
class _Row:
    """One row of vLLM's batch: its follower, and vLLM's own list of the tokens written so far."""

    follower: ThinkFollower
    output: list[int]
    read: int = 0


class ForcedPhrase(LogitsProcessor):
    """Leaves only the phrase's token possible where a thinking budget is used up.

    vLLM then reports log-probability 0.0 there; the engine marks the token as forced, and the loss leaves it out.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer, local_files_only=True)
        self._phrase = tuple(vllm_config.additional_config[PHRASE])
        self._transitions = transition_table(tokenizer, vllm_config.model_config.get_vocab_size())
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Forced tokens are rarely the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow what vLLM did to its batch: rows removed, then added, then moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows.pop(index, None)
            think = (params.extra_args or {}).get(THINK)
            if think is not None:
                self._rows[index] = self._row(think, prompt or [], output)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def _row(self, think: tuple[int, int, bool], prompt: list[int], output: list[int]) -> _Row:
        """Start a row; the part of `prompt` beyond the request's own prompt is completion already."""
        own, limit, is_open = think
        follower = ThinkFollower(self._transitions, self._phrase, limit, is_open)
        for token in prompt[own:]:
            follower.read(token)
        return _Row(follower, output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask the rows of logits [rows, vocabulary] at which the phrase must stand."""
        forced: dict[int, int] = {}
        for index, row in self._rows.items():
            for token in row.output[row.read :]:
                row.follower.read(token)
            row.read = len(row.output)
            token_id = row.follower.forced()
            if token_id is not None:
                forced[index] = token_id
        if forced:
            rows = torch.tensor(list(forced), device=logits.device)
            logits[rows] = float("-inf")
            logits[rows, torch.tensor(list(forced.values()), device=logits.device)] = 0.0
        return logits

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Requests come from VllmEngine, which has checked them."""


class LaneScheduler(Scheduler):
    """Schedules the requests of one lane (a prefix of their ids); those of other lanes keep their caches and wait.

    `preempted` collects the ids of requests whose cache vLLM gave up for want of room: it is computed again from tokens.
    """

    running: list[Any]  # set by the base class

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lane = ""
        self.preempted: set[str] = set()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step with the other lanes out of sight."""
        running = [request for request in self.running if not request.request_id.startswith(self.lane)]
        waiting = [request for request in self.waiting if not request.request_id.startswith(self.lane)]
        if running:
            self.running = [request for request in self.running if request.request_id.startswith(self.lane)]
        if waiting:
            self.waiting.remove_requests(waiting)
        output = super().schedule(*args, **kwargs)
        self.running.extend(running)
        for request in reversed(waiting):
            self.waiting.prepend_request(request)
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.preempted.add(request.request_id)
        super()._preempt_request(request, *args, **kwargs)


@dataclass
class ChannelInit(WeightTransferInitInfo):
    """How a worker joins the trainer's weight channel; its rank is `rank_offset` plus its number among the engine's workers."""

    meeting: str
    rank_offset: int
    world_size: int
    deadline_s: float


@dataclass
class WeightUpdate(WeightTransferUpdateInfo):
    """New weights: arrays by the checkpoint's names (bf16 as uint16), or nothing where they come through the channel as `version`."""

    version: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class WeightLoader(WeightTransferEngine[ChannelInit, WeightUpdate]):
    """Loads weights in the checkpoint's format, layer by layer, into the model that is running."""

    init_info_cls = ChannelInit
    update_info_cls = WeightUpdate

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._channel: weight_channel.WeightChannel | None = None

    def init_transfer_engine(self, init_info: ChannelInit) -> None:
        """Join the trainer's channel."""
        self._channel = weight_channel.join(
            init_info.meeting,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            device=self.device,
            deadline_s=init_info.deadline_s,
        )

    def start_weight_update(self) -> None:
        """Make the layers ready for weights in the checkpoint's format (they are packed on CPUs and fused everywhere)."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load; like the base's, but a CPU has no accelerator to wait for."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightUpdate) -> None:
        """Load arrays that are there, or buckets as the trainer sends them; raises ChannelLost for a trainer that falls silent."""
        if update_info.arrays:
            self.model.load_weights((name, tensor_of(array)) for name, array in update_info.arrays.items())
            return
        if self._channel is None:
            raise RuntimeError("weights were announced on a channel that this worker has not joined")
        for bucket in self._channel.receive(update_info.version):
            # Layers keep what they are given until they are complete, and the channel uses its buffer again.
            self.model.load_weights((name, tensor.clone()) for name, tensor in bucket)

    def finish_weight_update(self) -> None:
        """Turn the new weights into the layout that the kernels want."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # A widened head is computed without its packed copy.
        if not widen_head(self.model):
            self._follow_tied_head()

    def _follow_tied_head(self) -> None:
        """Pack a tied head anew: the reload packs the embedding that it shares its weight with, and leaves the head's own packed copy (CPUs) as it was."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if not getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def widen_head(model: Any) -> bool:
    """Keep a copy of the head in its wider dtype, on CPUs, and renew it after an update; return whether there is one.

    vLLM casts the whole head anew for every decode step (a fifth of the time of SmolLM2-135M in bf16).
    """
    head, processor = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
    weight, dtype = getattr(head, "weight", None), getattr(processor, "head_dtype", None)
    if weight is None or processor is None or dtype is None or dtype == weight.dtype or weight.device.type != "cpu":
        return False
    wide: torch.Tensor | None = getattr(processor, "scalerl_wide", None)
    if wide is not None:
        wide.copy_(weight.detach())  # fresh memory would have to be cleared first
        return True
    wide = processor.scalerl_wide = weight.detach().to(dtype)

    def apply(lm_head: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.to(dtype), wide, None if bias is None else bias.to(dtype))

    processor._apply_head = apply
    return True


class WorkerExtension:
    """Named as vLLM's worker extension, so that every worker process imports this module and knows the transfer."""

    def widen_head(self) -> None:
        """See `widen_head` above; called once at the start."""
        widen_head(self.model_runner.model)  # type: ignore[attr-defined]


# Importing a module happens once per process, so the name is free.
WeightTransferEngineFactory.register_engine(TRANSFER, WeightLoader)
