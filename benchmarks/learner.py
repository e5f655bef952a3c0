"""Speed of an update with the tiny model, and memory of chunked log-probabilities.

python -m benchmarks.learner update            # seconds per update, one thread; --alike 14: completions of a group share their first 14 tokens
python -m benchmarks.learner logprobs          # peak memory for 4,096 tokens and a vocabulary of 150,000
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
TOKENS, VOCABULARY, WIDTH = 4096, 150_000, 256


def tiny_folder(folder: Path, layers: int, width: int, inner: int) -> Path:
    """Write an untrained tiny Llama and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from scalerl.data import arithmetic

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(arithmetic.VOCABULARY),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=arithmetic.PAD,
        bos_token_id=arithmetic.BOS,
        eos_token_id=arithmetic.EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    arithmetic.tokenizer().save_pretrained(folder)
    return folder


def batch(groups: int, size: int, alike: int) -> list:
    """Groups like the tiny recipe's: prompts of 8 tokens, completions of 18 or so, every tenth about 32; the first `alike` tokens are the same in a group."""
    import numpy as np

    from scalerl.learner.batch import TrainGroup
    from scalerl.rollout.trace import Trace, TraceRequest

    rng = np.random.default_rng(0)
    made = []
    for number in range(groups):
        prompt = tuple(rng.integers(5, 22, 8).tolist())
        beginning = rng.integers(5, 22, alike)
        traces = []
        for sample in range(size):
            length = int(rng.integers(30, 38)) if rng.random() < 0.1 else int(rng.integers(16, 21))
            tokens = np.concatenate([beginning, rng.integers(5, 22, max(0, length - alike))])[:length]
            forced = np.zeros(length, bool)
            request = TraceRequest(number, f"p{number}", sample, prompt, 0, -1, 5)
            logprobs = np.full(length, -np.log(22.0))
            traces.append(Trace(request, tokens, logprobs, np.zeros(length), forced, "ended"))
        rewards = [1.0, -1.0, *rng.choice([-1.0, 1.0], size - 2).tolist()]
        made.append(
            TrainGroup(number, f"p{number}", traces, rewards, ["correct" if r > 0 else "wrong" for r in rewards])
        )
    return made


def update(arguments: argparse.Namespace) -> None:
    """Print seconds per update."""
    import torch

    from scalerl.learner import layout
    from scalerl.learner.trainer import Trainer
    from scalerl.recipe import Model, Recipe, Training

    torch.set_num_threads(1)
    recipe = Recipe(model=Model(body_dtype="float32"), training=Training())
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(tiny_folder(Path(folder), 4, 64, arguments.inner), recipe)
    for groups in (16, 32):
        made = batch(groups, 16, arguments.alike)
        traces = [trace for group in made for trace in group.traces]
        pieces = layout.cut(traces, 65_536, shared=True)
        trainer.update(made)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(arguments.repeats):
            trainer.update(made)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        tokens = sum(map(len, traces))
        print(
            f"{groups} groups x 16 traces, {tokens} completion tokens, {len(pieces)} micro-batches: "
            f"{cpu / arguments.repeats:.3f} CPU-s, {wall / arguments.repeats:.3f} s per update"
        )


def logprobs(arguments: argparse.Namespace) -> None:
    """Run full and chunked log-probabilities in processes of their own and print their peak memory and gradients' difference."""
    for kind in ("full", "chunked"):
        subprocess.run([sys.executable, "-m", "benchmarks.learner", "one", "--kind", kind], check=True)


def memory_gib(name: str) -> float:
    """Return a line of /proc/self/status in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def one(arguments: argparse.Namespace) -> None:
    """Forward and backward in this process; print the memory above what the inputs take."""
    import torch

    from scalerl.learner.logprobs import token_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) / 32).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
    before = memory_gib("VmRSS")
    started = time.perf_counter()
    if arguments.kind == "full":
        values = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    else:
        values, _ = token_logprobs(hidden, weight, targets, 1.0)
    values.sum().backward()
    seconds = time.perf_counter() - started
    peak = memory_gib("VmHWM") - before
    assert hidden.grad is not None and weight.grad is not None
    gradients = (hidden.grad.nbytes + weight.grad.nbytes) / 2**30
    print(
        f"{arguments.kind}: {peak:.2f} GiB above the inputs, gradients ({gradients:.2f} GiB) included; {seconds:.1f} s, "
        f"sum {values.sum().item():.2f}, gradient norm {hidden.grad.norm().item():.6f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["update", "logprobs", "one"])
    parser.add_argument("--inner", type=int, default=128, help="width of the tiny model's feed-forward part")
    parser.add_argument("--alike", type=int, default=0, help="tokens with which all completions of a group begin")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kind", choices=["full", "chunked"], default="chunked")
    parsed = parser.parse_args()
    {"update": update, "logprobs": logprobs, "one": one}[parsed.what](parsed)
