"""Tokens per second of TorchEngine against transformers' `generate`: same tiny Llama, same prompts, same completion lengths, one thread.

    python -m benchmarks.rollout [--slots 64 256] [--rounds 4] [--lengths uniform]

Both sample at temperature 1. Lengths are given, because a random model has no sense of an end: tokens that would end a completion are
made impossible, `generate` stops each row by a criterion, the engine by its thinking budget. `generate` decodes batches of `slots` prompts
until the longest row of each is done; the engine lets new prompts join instead. Only tokens up to a row's own length count. Times are CPU
seconds of the process (other work on the machine disturbs them less) and wall seconds.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

from scalerl import streams
from scalerl.data.arithmetic import BOS, EOS, PAD, SPECIAL_TOKENS, THINK, VOCABULARY, tokenizer
from scalerl.rollout.torch_engine import TorchEngine
from scalerl.rollout.trace import TraceRequest

PROMPT_TOKENS = 8


def endless_llama() -> Any:
    """Return 4 layers of width 64 with random weights in which no special token can be sampled."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    ).eval()
    special = list(range(len(SPECIAL_TOKENS)))
    with torch.no_grad():
        # Nothing writes to residual channel 0, so it stays positive, and the head gives special tokens its large negative.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = 0.1
        model.lm_head.weight[special] = 0
        model.lm_head.weight[special, 0] = -1000
    return model


def prompts(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return random prompts of sums, int64 [count, PROMPT_TOKENS]."""
    ids = rng.integers(len(SPECIAL_TOKENS), len(VOCABULARY), (count, PROMPT_TOKENS))
    ids[:, 0], ids[:, -1] = BOS, THINK
    return ids


class RowLengths(transformers.StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, lengths: np.ndarray):
        self.ends = torch.from_numpy(lengths) + PROMPT_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def run_generate(model: Any, ids: np.ndarray, lengths: np.ndarray, slots: int) -> int:
    """Generate with transformers, `slots` at a time; returns tokens kept."""
    for start in range(0, len(ids), slots):
        batch, wanted = ids[start : start + slots], lengths[start : start + slots]
        model.generate(
            torch.from_numpy(batch),
            attention_mask=torch.ones(batch.shape, dtype=torch.long),
            do_sample=True,
            top_k=0,
            max_new_tokens=int(wanted.max()),
            stopping_criteria=transformers.StoppingCriteriaList([RowLengths(wanted)]),
        )
    return int(lengths.sum())


def run_engine(model: Any, ids: np.ndarray, lengths: np.ndarray, slots: int) -> int:
    """Generate with TorchEngine; returns its tokens."""
    engine = TorchEngine(
        model,
        tokenizer(),
        slots=slots,
        temperature=1.0,
        head_dtype="float32",
        max_tokens=PROMPT_TOKENS + int(lengths.max()),
        phrase="</think>",
    )
    engine.submit(
        [
            TraceRequest(i, f"prompt-{i}", 0, tuple(row.tolist()), streams.key(0, "bench", i), int(length) - 2, 1)
            for i, (row, length) in enumerate(zip(ids, lengths, strict=True))
        ]
    )
    tokens = 0
    while engine.pending:
        tokens += sum(len(trace) for trace in engine.step(64))
    return tokens


def timed(run: Callable[[], int]) -> tuple[int, float, float]:
    """Return tokens, CPU seconds and seconds of a run."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = run()
    return tokens, time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    """Print tokens per CPU second of both sides for every law of lengths and number of slots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=4, help="completions = rounds x slots")
    parser.add_argument("--lengths", choices=["uniform", "exponential"], help="only this law")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rng = np.random.default_rng(0)
    model = endless_llama()
    laws: dict[str, Callable[[int], np.ndarray]] = {
        "uniform 8..128": lambda count: rng.integers(8, 129, count),
        "exponential mean 29": lambda count: np.maximum(2, np.rint(rng.exponential(29, count))).astype(np.int64),
    }
    print(
        "lengths               slots   tokens   engine tok/s (cpu, wall)   generate tok/s (cpu, wall)   ratio (cpu, wall)"
    )
    for name, law in laws.items():
        if options.lengths and not name.startswith(options.lengths):
            continue
        for slots in options.slots:
            lengths = law(slots * options.rounds)
            ids = prompts(len(lengths), rng)
            ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
            # Both start warm; the engine's first use builds its C parts.
            run_generate(theirs, ids[:8], lengths[:8], slots)
            run_engine(copy.deepcopy(model), ids[:8], lengths[:8], slots)
            tokens, cpu, wall = timed(lambda: run_engine(ours, ids, lengths, slots))  # noqa: B023
            assert tokens == lengths.sum(), (tokens, lengths.sum())
            _, cpu_generate, wall_generate = timed(lambda: run_generate(theirs, ids, lengths, slots))  # noqa: B023
            print(
                f"{name:<22}{slots:>5}{tokens:>9}{tokens / cpu:>13.0f}{tokens / wall:>10.0f}"
                f"{tokens / cpu_generate:>18.0f}{tokens / wall_generate:>10.0f}"
                f"{cpu_generate / cpu:>14.1f}{wall_generate / wall:>7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
