"""One vLLM in this process, driven a step at a time, shared by the engines of two lanes (training and evaluation).

vLLM's own asynchronous front end decodes on by itself. Here a call decodes the steps that it was asked for and then stands still, because the loop paces itself by
decode steps, an evaluation must not let training traces run on for nothing, and a stage boundary needs still traces; so this process owns vLLM's scheduler.
Every call has a deadline; after the first that is missed the core is lost (`EngineLost`) and must be replaced together with its process.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.rollout.channel_errors import ChannelLost
from scalerl.rollout.deadline import CallThread, EngineLost
from warehouse.errors import UserError

# Names of lanes: prefixes of vLLM's request ids.
TRAIN, EVALUATION, SCORE = "train-", "evaluation-", "score-"
# Both lanes may be full, and scoring takes a little.
_LANES_OF_CACHE = 2.25
# Tokens of one forward pass beyond one per slot: prompts that are read along.
_PREFILL_TOKENS = 8192
# Tokens of one block of vLLM's cache on CPUs; its kernels want a multiple of 32.
_CPU_BLOCK = 32


@dataclass(frozen=True)
class VllmOptions:
    """What a core is made for; memory and deadlines change no result.

    slots: traces decoded at once per lane. max_tokens: prompt and completion together. gpu_memory: share of a GPU's memory that vLLM may take.
    """

    slots: int
    max_tokens: int
    phrase: tuple[int, ...]
    body_dtype: str = "float32"
    head_dtype: str = "float32"
    seed: int = 0
    tensor_parallel: int = 1
    gpu_memory: float = 0.9
    start_deadline_s: float = 600.0
    call_deadline_s: float = 240.0


def require_vllm() -> None:
    """Raise UserError, naming the extra to install, where vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.engine = vllm: vLLM is not installed; run `make vllm` for a CPU, or install the extra "
            "`scalerl-pipelines[gpu]` for GPUs, or set rollout.engine = torch"
        )


class VllmCore:
    """Requests in, sampled tokens out, one vLLM step at a time; weights in between."""

    def __init__(self, folder: Path, options: VllmOptions, version: int = 0) -> None:
        """Load a checkpoint folder; raises UserError where vLLM is missing, EngineLost where it does not start in time."""
        require_vllm()
        self.folder, self.options, self.version = Path(folder), options, version
        self._thread = CallThread("vLLM")
        self._engine: Any = self._call("the start", self._start, options.start_deadline_s)
        self._internal: dict[str, str] = {}
        self._set_version(version)

    def _call(self, what: str, call: Callable[[], Any], deadline_s: float | None = None) -> Any:
        return self._thread.run(what, deadline_s or self.options.call_deadline_s, call)

    def _start(self) -> Any:
        _set_environment()
        import torch
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from scalerl.rollout import vllm_parts as parts

        options, on_cpu = self.options, not torch.cuda.is_available()
        if on_cpu:
            _refuse_head_size(self.folder)
        memory: dict[str, Any] = {"gpu_memory_utilization": options.gpu_memory}
        if on_cpu:
            memory = {"kv_cache_memory_bytes": cache_bytes(self.folder, options), "block_size": _CPU_BLOCK}
        arguments = EngineArgs(
            model=str(self.folder),
            dtype=options.body_dtype,
            hf_overrides={"head_dtype": "float32"} if options.head_dtype == "float32" else {},
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            max_model_len=options.max_tokens,
            max_num_seqs=options.slots,
            max_num_batched_tokens=min(
                options.slots * options.max_tokens, options.slots + max(_PREFILL_TOKENS, options.max_tokens)
            ),
            seed=options.seed,
            enable_prefix_caching=True,
            enforce_eager=on_cpu,
            async_scheduling=False,
            tensor_parallel_size=options.tensor_parallel,
            distributed_executor_backend="uni" if options.tensor_parallel == 1 else "mp",
            scheduler_cls=parts.LaneScheduler,
            logits_processors=[parts.ForcedPhrase],
            additional_config={parts.PHRASE: list(options.phrase)},
            worker_extension_cls=f"{parts.__name__}.WorkerExtension",
            weight_transfer_config={"backend": parts.TRANSFER},
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **memory,
        )
        engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        engine.collective_rpc("widen_head")
        return engine

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def add(self, request_id: str, tokens: Sequence[int], parameters: Mapping[str, Any]) -> None:
        """Queue a request; its id begins with a lane's name. It shares the caches of equal prompts that began with the same weights only."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompt = {"prompt_token_ids": list(tokens), "cache_salt": f"version {self.version}"}
        # Scoring asks for a given token's log-probability, sampling for the sampled one's.
        asked = None if "logprob_token_ids" in parameters else 0
        settings = SamplingParams(
            logprobs=asked,
            detokenize=False,
            ignore_eos=True,
            top_k=0,
            output_kind=RequestOutputKind.DELTA,
            **parameters,
        )
        self._internal[request_id] = self._call(
            "a new request", lambda: self._engine.add_request(request_id, prompt, settings)
        )

    def remove(self, request_ids: Sequence[str]) -> None:
        """Forget requests, finished or not."""
        if request_ids:
            self._call("an abort", lambda: self._engine.abort_request(list(request_ids)))
            for request_id in request_ids:
                self._internal.pop(request_id, None)

    def step(self, lane: str) -> list[tuple[str, int, float]]:
        """Run one step for one lane; return (request id, token, log-probability) for each request that got a token."""
        return self._call("a decode step", lambda: self._step(lane))

    def _step(self, lane: str) -> list[tuple[str, int, float]]:
        self._core.scheduler.lane = lane
        sampled = []
        for output in self._engine.step():
            completion = output.outputs[0]
            count = len(completion.token_ids)
            if count:
                token = completion.token_ids[-1]
                sampled.append((output.request_id, token, completion.logprobs[-1][token].logprob))
        return sampled

    def take_preempted(self) -> set[str]:
        """Return the requests whose cache was given up for want of room since the last call."""
        scheduler = self._core.scheduler
        if not scheduler.preempted:
            return set()
        taken, scheduler.preempted = scheduler.preempted, set()
        return {request_id for request_id, internal in self._internal.items() if internal in taken}

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[float]:
        """Return the log-probability of the last token of each sequence, its cache computed from tokens with the present weights."""
        ids = [f"{SCORE}{number}" for number in range(len(sequences))]
        for request_id, sequence in zip(ids, sequences, strict=True):
            wanted = {"temperature": temperature, "max_tokens": 1, "logprob_token_ids": [int(sequence[-1])]}
            self.add(request_id, [int(token) for token in sequence[:-1]], wanted)
        return self._call("scoring", lambda: self._score(ids, [int(sequence[-1]) for sequence in sequences]))

    def _score(self, ids: Sequence[str], tokens: Sequence[int]) -> list[float]:
        self._core.scheduler.lane = SCORE
        found: dict[str, float] = {}
        wanted = dict(zip(ids, tokens, strict=True))
        while len(found) < len(ids):
            for output in self._engine.step():
                if output.finished:
                    found[output.request_id] = output.outputs[0].logprobs[-1][wanted[output.request_id]].logprob
        for request_id in ids:
            self._internal.pop(request_id, None)
        return [found[request_id] for request_id in ids]

    def load_arrays(self, arrays: Mapping[str, np.ndarray], version: int) -> None:
        """Replace the weights by arrays in the checkpoint's names; running requests keep their caches."""
        self._update({"version": version, "arrays": dict(arrays)}, version)

    def join_channel(self, meeting: str, rank_offset: int, world_size: int, deadline_s: float) -> None:
        """Let every worker join the trainer's weight channel; see `scalerl.rollout.weight_channel`."""
        start = {"meeting": meeting, "rank_offset": rank_offset, "world_size": world_size, "deadline_s": deadline_s}
        self._call("the meeting of the weight channel", lambda: self._rpc("init_weight_transfer_engine", start))

    def receive(self, version: int) -> None:
        """Take the weights that the trainer sends as `version` through the channel."""
        self._update({"version": version}, version)

    def _update(self, update: dict[str, Any], version: int) -> None:
        def change() -> None:
            # Nothing runs between two steps; the pause makes sure that vLLM knows, and keeps every cache.
            self._core.pause_scheduler(mode="keep", clear_cache=False)
            self._rpc("start_weight_update")
            self._rpc("update_weights", update)
            self._rpc("finish_weight_update")
            self._core.resume_scheduler()

        try:
            self._call(f"the update to version {version}", change)
        except ChannelLost as error:
            # Some layers are new and some are not: nothing may be sampled from that.
            self._thread.give_up(str(error))
            raise EngineLost(str(error)) from error
        self._set_version(version)

    def _rpc(self, method: str, *arguments: Any) -> Any:
        return self._engine.collective_rpc(method, args=arguments)

    def _set_version(self, version: int) -> None:
        self._call("a new version", lambda: self._engine.set_weight_version(str(version)))
        self.version = version

    def close(self) -> None:
        """End vLLM and free its memory; a process may then start another."""
        from vllm.distributed import cleanup_dist_env_and_memory

        def end() -> None:
            self._engine.engine_core.shutdown()
            cleanup_dist_env_and_memory(shutdown_ray=False)

        self._thread.last("the end", self.options.call_deadline_s, end)
        self._engine = None


def _set_environment() -> None:
    """Settings that vLLM reads when it is imported: no telemetry, no hub, no compilation on CPUs, the scheduler in this process."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Threads come from the cores that the process was given; vLLM would bind them to cores of its own choice.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _head_shape(folder: Path) -> tuple[int, int, int]:
    """Return layers, key/value heads and elements of a head of a checkpoint."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, dim


def _refuse_head_size(folder: Path) -> None:
    """Raise UserError for heads that vLLM's CPU kernels cannot read."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known, (_, _, dim) = CPUAttentionBackend.get_supported_head_sizes(), _head_shape(folder)
    if dim not in known:
        raise UserError(
            f"rollout.engine = vllm: this model's heads have {dim} elements, vLLM on a CPU knows {', '.join(map(str, known))}; "
            "set rollout.engine = torch, or for tiny-llama a model.heads that divides model.width into one of these"
        )


def cache_bytes(folder: Path, options: VllmOptions) -> int:
    """Return the bytes of keys and values for full lanes of the longest sequences, whole blocks."""
    layers, key_heads, dim = _head_shape(folder)
    width = 4 if options.body_dtype == "float32" else 2
    tokens = _LANES_OF_CACHE * options.slots * (options.max_tokens + 2 * _CPU_BLOCK)
    return max(64 << 20, int(tokens) * layers * key_heads * dim * 2 * width)
