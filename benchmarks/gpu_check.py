"""Check the parts that need GPUs, one line per item: pass, FAIL or skipped.

    python benchmarks/gpu_check.py               # one GPU: trainer, losses, TorchEngine; two: FSDP2 over both and weights over NCCL; vLLM if it is installed
    python benchmarks/gpu_check.py --device cpu  # the same code on this machine's cores, over gloo

Needs torch and transformers; no Ray, no Prefect, and vLLM only for its own item. Ends with code 1 if an item fails.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
GROUPS, SIZE, MAX_TOKENS, TEMPERATURE = 12, 8, 48, 0.8
DEADLINE_S = 240.0


class Skip(Exception):
    """An item cannot run here; the message says why."""


def main() -> int:
    """Run every item, or one role of an item in a process of its own; returns 1 where an item failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state that is sent between processes")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        print(json.dumps(ROLES[options.role](options)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        options.folder = Path(folder)
        return check(options)


def check(options: argparse.Namespace) -> int:
    """Run every item and print its line; return the exit code."""
    import torch

    devices = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.device == "cuda":
        print(f"torch {torch.__version__}, {devices} GPU(s)", *[torch.cuda.get_device_name(i) for i in range(devices)])
    elif not torch.cuda.is_available():
        torch.set_num_threads(1)
    failed = 0
    for name, needs, item in ITEMS:
        started = time.monotonic()
        try:
            if devices < needs:
                raise Skip("no GPU" if devices == 0 else f"needs {needs} GPUs, {devices} here")
            line = f"pass     {name}: {item(options)} ({time.monotonic() - started:.1f} s)"
        except Skip as reason:
            line = f"skipped  {name}: skipped: {reason}"
        except Exception as error:  # noqa: BLE001 - an item that fails must not hide the others
            failed += 1
            traceback.print_exc()
            line = f"FAIL     {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(line, flush=True)
    return 1 if failed else 0


# ---- what the items share


def model_folder(options: argparse.Namespace) -> Path:
    """Write, once, an untrained Llama of 4 layers whose heads have 64 elements, and the arithmetic tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from scalerl.data import arithmetic

    folder = options.folder / "model"
    if not folder.is_dir():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(arithmetic.VOCABULARY), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
            pad_token_id=arithmetic.PAD, bos_token_id=arithmetic.BOS, eos_token_id=arithmetic.EOS, initializer_range=0.08,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
        arithmetic.tokenizer().save_pretrained(folder)
    return folder


def recipe(body_dtype: str, *overrides: str) -> Any:
    """The tiny recipe with a body dtype and this script's sampling."""
    from scalerl.recipe import load

    settings = (f"model.body_dtype={body_dtype}", f"rollout.temperature={TEMPERATURE}", "optimizer.lr=1e-4")
    return load("tiny", [*settings, *overrides])


def requests(seed: int = 0) -> list[Any]:
    """Groups of requests with prompts of 3 to 8 tokens, thinking budgets of 4 to 19 and answers of 6."""
    import numpy as np

    from scalerl import streams
    from scalerl.data import arithmetic
    from scalerl.rollout.trace import TraceRequest

    made = []
    for group in range(GROUPS):
        rng = np.random.default_rng([seed, group])
        prompt = (*rng.integers(5, 21, rng.integers(2, 8)).tolist(), arithmetic.THINK)
        for sample in range(SIZE):
            stream = streams.key(seed, "gpu-check", group, sample)
            made.append(TraceRequest(group, f"p{group}", sample, prompt, stream, 4 + (group + sample) % 16, 6))
    return made


def finish(engine: Any) -> list[Any]:
    """Decode until nothing is left."""
    traces = []
    while engine.pending:
        traces += engine.step(8)
    return traces


def torch_engine(options: argparse.Namespace, body_dtype: str) -> tuple[Any, Any]:
    """Return a TorchEngine on the device and its model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from scalerl.rollout.torch_engine import TorchEngine

    folder = model_folder(options)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, body_dtype))
    model = model.to(options.device).eval()
    engine = TorchEngine(
        model, AutoTokenizer.from_pretrained(folder), slots=48, temperature=TEMPERATURE, head_dtype="float32",
        max_tokens=MAX_TOKENS, phrase="stop</think>",
    )  # fmt: skip
    return engine, model


def groups_of(traces: list[Any]) -> list[Any]:
    """Return judged groups with rewards of both signs."""
    from scalerl.learner.batch import TrainGroup

    made = []
    for group in range(GROUPS):
        mine = [trace for trace in traces if trace.request.group_id == group]
        rewards = [1.0 if (trace.request.sample + group) % 3 == 0 else -1.0 for trace in mine]
        outcomes = ["correct" if reward > 0 else "wrong" for reward in rewards]
        made.append(TrainGroup(group, f"p{group}", mine, rewards, outcomes))
    return made


def trainer(options: argparse.Namespace, body_dtype: str, **ranks: Any) -> Any:
    """Return a trainer of the little model on the device that is checked."""
    from scalerl.learner.trainer import Trainer

    return Trainer(model_folder(options), recipe(body_dtype), device=options.device, **ranks)


def gap_to_trainer(options: argparse.Namespace, traces: list[Any], weights_of: Any) -> tuple[float, float]:
    """Return mean and largest |log-probability of trainer minus engine| over sampled tokens."""
    import numpy as np
    import torch

    from scalerl.learner import layout

    batch = layout.collate(traces, np.arange(len(traces)), False).to(weights_of.device)
    with torch.no_grad():
        logprobs, _ = weights_of._policy(batch.rows, batch.index, batch.targets)
    gap = (logprobs - batch.behaviour.to(logprobs)).abs()
    return gap.mean().item(), gap.max().item()


def play(options: argparse.Namespace, folder: Path, roles: list[tuple[str, int]]) -> list[Any]:
    """Run this script once per (role, rank), each with a GPU of its own; return what each printed."""
    command = [
        sys.executable,
        __file__,
        "--device",
        options.device,
        "--megabytes",
        str(options.megabytes),
        "--folder",
        str(folder),
    ]
    peers = []
    for number, (role, rank) in enumerate(roles):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(number) if options.device == "cuda" else ""}
        environment["OMP_NUM_THREADS"] = "1"
        peers.append(
            subprocess.Popen(
                [*command, "--role", role, "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    answers = []
    try:
        for peer in peers:
            out, err = peer.communicate(timeout=DEADLINE_S)
            if peer.returncode:
                raise RuntimeError(err.strip().splitlines()[-1] if err.strip() else f"exit code {peer.returncode}")
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for peer in peers:
            peer.kill()
    return answers


# ---- items


def losses_on_the_device(options: argparse.Namespace) -> str:
    """Every loss and its gradient on the device against float64 on the CPU."""
    import torch

    from scalerl.learner.losses import token_loss
    from scalerl.recipe import Loss

    torch.manual_seed(0)
    worst = 0.0
    settings = [Loss(), Loss(kind="grpo"), Loss(kind="dapo"), Loss(kind="gspo", clip_low=3e-3, clip_high=4e-3)]
    for loss in settings:
        found = []
        now, then, advantages = -torch.rand(4000) * 3, -torch.rand(4000) * 3, torch.randn(4000)
        for device, dtype in (("cpu", torch.float64), (options.device, torch.float32)):
            logprobs = now.to(device, dtype).requires_grad_()
            traces = (torch.arange(4000) // 40).to(device)
            values = token_loss(loss, logprobs, then.to(device, dtype), advantages.to(device, dtype), traces).values
            values.sum().backward()
            found.append((values.detach().cpu().double(), logprobs.grad.cpu().double()))
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*found, strict=True)))
    if worst > 1e-3:
        raise AssertionError(f"values or gradients differ by {worst:.2g}")
    return f"cispo, grpo, dapo, gspo: largest difference {worst:.1e}"


def engine_against_forward(options: argparse.Namespace) -> str:
    """TorchEngine's log-probabilities in fp32 against a plain forward pass of transformers."""
    import torch

    engine, model = torch_engine(options, "float32")
    engine.submit(requests())
    started = time.monotonic()
    traces = finish(engine)
    speed = sum(map(len, traces)) / (time.monotonic() - started)
    worst = 0.0
    for trace in traces[::5]:
        ids = torch.tensor([[*trace.request.prompt_tokens, *trace.tokens.tolist()]], device=options.device)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(trace.request.prompt_tokens) - 1 : -1].double()
        own = torch.log_softmax(logits / TEMPERATURE, -1).cpu().numpy()[range(len(trace)), trace.tokens]
        worst = max(worst, abs(own - trace.logprobs)[~trace.forced].max())
    if worst > 1e-4:
        raise AssertionError(f"log-probabilities differ by {worst:.2g}")
    return f"{len(traces)} traces, {speed:,.0f} tokens/s, largest difference {worst:.1e} nats"


def training(body_dtype: str) -> Callable[[argparse.Namespace], str]:
    """Generator and trainer in turn for three updates, with the log-probability gap of each and a checkpoint at the end."""

    def item(options: argparse.Namespace) -> str:
        engine, _ = torch_engine(options, body_dtype)
        learner = trainer(options, body_dtype)
        engine.load_weights(learner.weights(), 0)
        gaps = []
        for version in range(1, 4):
            engine.submit(requests(version))
            traces = finish(engine)
            gaps.append(gap_to_trainer(options, traces, learner))
            metrics = learner.update(groups_of(traces))
            if not metrics["updated"] or not metrics["grad_norm"] > 0:
                raise AssertionError(f"update {version} changed nothing: {metrics}")
            engine.load_weights(learner.weights(), version)
        (options.folder / body_dtype).mkdir()
        learner.save(options.folder / body_dtype)
        mean, largest = max(gap[0] for gap in gaps), max(gap[1] for gap in gaps)
        if (body_dtype == "float32" and largest > 1e-4) or mean > 0.1:
            raise AssertionError(f"log-probability gap to the trainer: mean {mean:.2g}, largest {largest:.2g}")
        return f"three updates, gap mean {mean:.1e}, largest {largest:.1e} nats"

    return item


def sharded(options: argparse.Namespace, ranks: int) -> str:
    """FSDP2 on one or two devices against the trainer without it: losses of three updates."""
    engine, _ = torch_engine(options, "float32")
    engine.submit(requests(9))
    traces = [trace.to_dict() for trace in finish(engine)]
    folder = options.folder / f"fsdp-{ranks}"
    folder.mkdir()
    (folder / "traces.json").write_text(json.dumps(traces))
    (folder / "model").symlink_to(model_folder(options).resolve())
    (alone,) = play(options, folder, [("alone", 0)])
    together = play(options, folder, [(f"rank-of-{ranks}", rank) for rank in range(ranks)])
    worst = max(abs(a - b) for losses in together for a, b in zip(alone, losses, strict=True))
    if worst > 1e-4:
        raise AssertionError(f"losses {together[0]} differ from {alone}")
    return f"three losses within {worst:.1e} of the trainer without FSDP2"


def updates(options: argparse.Namespace, ranks: int) -> list[float]:
    """Role: three updates of one rank on stored traces."""
    from scalerl.rollout.trace import Trace

    traces = [Trace.from_dict(content) for content in json.loads((options.folder / "traces.json").read_text())]
    where = (
        {"rank": options.rank, "world_size": ranks, "init_file": options.folder / f"meet-{ranks}"} if ranks > 1 else {}
    )
    learner = trainer(options, "float32", **where)
    return [learner.update(groups_of(traces))["loss"] for _ in range(3)]


def transfer(options: argparse.Namespace) -> str:
    """A state of the given size from one device to another through the weight channel: equal, and how fast."""
    folder = options.folder / "transfer"
    folder.mkdir()
    sent, received = play(options, folder, [("send", 0), ("receive", 1)])
    if not received["equal"]:
        raise AssertionError("the received state differs from the sent one")
    speed = max(sent["bytes"] / seconds for seconds in sent["seconds"]) / 1e9
    return f"{sent['bytes'] / 1e6:.0f} MB equal on the other side, {speed:.2f} GB/s, over {'NCCL' if options.device == 'cuda' else 'gloo'}"


def state_of(options: argparse.Namespace) -> dict[str, Any]:
    """A state of the wanted size whose numbers follow from their places."""
    import torch

    count = max(1, options.megabytes // 32)
    numbers = torch.arange(8 << 20, dtype=torch.float32, device=options.device)
    return {f"layer.{i}": (numbers + i).view(4096, 2048) for i in range(count)}


def channel_of(options: argparse.Namespace) -> Any:
    """Join the weight channel as `options.rank` of its two members."""
    import torch

    from scalerl.rollout import weight_channel

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    meeting = f"file://{options.folder}/channel"
    return weight_channel.join(meeting, rank=options.rank, world_size=2, device=device, deadline_s=60.0)


def send(options: argparse.Namespace) -> dict[str, Any]:
    """Role: send the state three times."""
    import torch

    channel, state = channel_of(options), state_of(options)
    done = [channel.send(version, state, torch.float32) for version in (1, 2, 3)]
    return {"bytes": done[0].bytes, "seconds": [transfer.seconds for transfer in done]}


def receive(options: argparse.Namespace) -> dict[str, Any]:
    """Role: receive it three times and compare."""
    import torch

    channel, state = channel_of(options), state_of(options)
    equal = True
    for version in (1, 2, 3):
        seen = 0
        for bucket in channel.receive(version):
            if version == 3:  # the first two are timed
                equal = equal and all(torch.equal(tensor, state[name]) for name, tensor in bucket)
            seen += len(bucket)
        equal = equal and seen == len(state)
    return {"equal": equal}


def vllm(options: argparse.Namespace) -> str:
    """vLLM on the device, its weights changed in flight, against the trainer."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    folder = options.folder / "vllm"
    folder.mkdir()
    (folder / "model").symlink_to(model_folder(options).resolve())
    (answer,) = play(options, folder, [("vllm", 0)])
    if answer["largest"] > answer["allowed"]:
        raise AssertionError(f"log-probability gap to the trainer {answer['largest']:.2g}")
    return f"{answer['traces']} traces, two updates in flight, gap mean {answer['mean']:.1e}, largest {answer['largest']:.1e} nats"


def vllm_role(options: argparse.Namespace) -> dict[str, Any]:
    """Role: decode, change weights in flight twice, decode what begins after that, compare it with the trainer."""
    from transformers import AutoTokenizer

    from scalerl.rollout.interruption import phrase_ids
    from scalerl.rollout.vllm_core import VllmCore, VllmOptions
    from scalerl.rollout.vllm_engine import VllmEngine

    body = "bfloat16" if options.device == "cuda" else "float32"
    folder = options.folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = VllmOptions(48, MAX_TOKENS, phrase_ids(tokenizer, "stop</think>"), body, gpu_memory=0.3)
    engine = VllmEngine(VllmCore(folder, settings), tokenizer, temperature=TEMPERATURE)
    learner = trainer(options, body)
    engine.submit(requests(1))
    for version in (1, 2):
        traces = engine.step(4)
        learner.update(groups_of([*traces, *learner_food(options)]))
        engine.load_weights(learner.weights(), version)
    engine.submit(requests(2))
    begun = [trace for trace in finish(engine) if trace.oldest_version == 2]
    mean, largest = gap_to_trainer(options, begun, learner)
    return {"traces": len(begun), "mean": mean, "largest": largest, "allowed": 1e-4 if body == "float32" else 1.0}


def learner_food(options: argparse.Namespace) -> list[Any]:
    """Finished traces of a TorchEngine, so that the trainer has something to learn from."""
    engine, _ = torch_engine(options, "float32")
    engine.submit(requests(3))
    return finish(engine)


ROLES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "alone": lambda options: updates(options, 1),
    "rank-of-1": lambda options: updates(options, 1),
    "rank-of-2": lambda options: updates(options, 2),
    "send": send,
    "receive": receive,
    "vllm": vllm_role,
}
# Name, devices needed, function.
ITEMS: list[tuple[str, int, Callable[[argparse.Namespace], str]]] = [
    ("losses", 1, losses_on_the_device),
    ("TorchEngine, fp32", 1, engine_against_forward),
    ("training, fp32", 1, training("float32")),
    ("training, bf16 body and fp32 head", 1, training("bfloat16")),
    ("FSDP2 on two devices", 2, lambda options: sharded(options, 2)),
    ("weight channel between two devices", 2, transfer),
    ("vLLM", 1, vllm),
]

if __name__ == "__main__":
    sys.exit(main())
