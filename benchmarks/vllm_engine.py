"""Tokens per second of VllmEngine and TorchEngine on one checkpoint, same requests, one process each, and what an update of all weights takes.

python benchmarks/vllm_engine.py FOLDER [--engine vllm|torch] [--sequences 64] [--tokens 40] [--body bfloat16] [--updates 5]
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips in all?"


def make(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the engine and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from scalerl.rollout.interruption import phrase_ids

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    phrase, longest = "stop</think>", 64 + options.tokens
    if options.engine == "vllm":
        from scalerl.rollout.vllm_core import VllmCore, VllmOptions
        from scalerl.rollout.vllm_engine import VllmEngine

        settings = VllmOptions(options.sequences, longest, phrase_ids(tokenizer, phrase), options.body)
        return VllmEngine(VllmCore(options.folder, settings), tokenizer, temperature=1.0), tokenizer
    from scalerl.rollout.torch_engine import TorchEngine

    model: Any = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.body)).eval()
    engine = TorchEngine(
        model,
        tokenizer,
        slots=options.sequences,
        temperature=1.0,
        head_dtype="float32",
        max_tokens=longest,
        phrase=phrase,
    )
    return engine, tokenizer


def update_seconds(engine: Any, options: argparse.Namespace) -> tuple[float, float, int]:
    """Return median CPU seconds and wall seconds of an update with the checkpoint's own weights, and their bytes."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.body))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if options.body == "bfloat16":
        state = {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in tensors.items()}
    else:
        state = {name: tensor.numpy() for name, tensor in tensors.items()}
    taken = []
    for version in range(1, options.updates + 2):
        began = time.process_time(), time.monotonic()
        engine.load_weights(state, version)
        taken.append((time.process_time() - began[0], time.monotonic() - began[1]))
    # The first one warms up.
    cpu, wall = np.median(taken[1:], axis=0)
    return float(cpu), float(wall), sum(array.nbytes for array in state.values())


def main() -> None:
    """Print tokens a second of one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--body", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    from scalerl.rollout.trace import TraceRequest

    started = time.monotonic()
    engine, tokenizer = make(options)
    print(
        f"{options.engine}, {options.body} body, fp32 head: ready after {time.monotonic() - started:.1f} s", flush=True
    )
    prompt = tuple(tokenizer.encode(PROMPT)[:60])
    speeds = []
    for repeat in range(options.repeats + 1):
        before = engine.stats()
        engine.submit(
            [TraceRequest(i // 8, "p", i % 8, prompt, 97 * i + repeat, -1, 1) for i in range(options.sequences)]
        )
        begun = time.monotonic()
        while engine.pending:
            engine.step(8)
        speeds.append((engine.stats().tokens_generated - before.tokens_generated) / (time.monotonic() - begun))
    # The first round warms up.
    print(
        f"{options.sequences} sequences of up to {64 + options.tokens - len(prompt)} tokens: {sorted(speeds[1:])[len(speeds[1:]) // 2]:,.0f} tokens/s"
    )
    cpu, wall, size = update_seconds(engine, options)
    print(f"an update of {size / 1e6:.0f} MB: {cpu:.2f} CPU seconds, {wall:.2f} s")


if __name__ == "__main__":
    main()
