"""Publication of new weights on one host: a state of 500 MB from the trainer's memory into a generator's model.

    python benchmarks/weights.py objects   # Ray's object store, as the loop does it: GB/s of put, of get and copy, of both
    python benchmarks/weights.py channel   # buckets over gloo between two processes: GB/s

The state looks like a Llama's: matrices of 4 to 32 MB and small vectors, fp32.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# As in runs: Ray's own niceness of 15 starves workers on a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def state(megabytes: int) -> dict[str, Any]:
    """Return tensors of `megabytes` in all, by the names of a Llama of width 1,024."""
    import torch

    made: dict[str, Any] = {"model.embed_tokens.weight": torch.randn(8192, 1024)}
    layer = 0
    while sum(tensor.nbytes for tensor in made.values()) < megabytes * 1e6:
        name = f"model.layers.{layer}"
        made[f"{name}.input_layernorm.weight"] = torch.randn(1024)
        for part in ("q", "k", "v", "o"):
            made[f"{name}.self_attn.{part}_proj.weight"] = torch.randn(1024, 1024)
        made[f"{name}.mlp.up_proj.weight"] = torch.randn(2816, 1024)
        made[f"{name}.mlp.down_proj.weight"] = torch.randn(1024, 2816)
        layer += 1
    return made


class Sender:
    """Holds the state; returns it as the trainer does, as read-only arrays that Ray copies into its store."""

    def __init__(self, megabytes: int) -> None:
        self._state = state(megabytes)

    def weights(self) -> dict[str, Any]:
        """Return the state as arrays that nobody may write to, as the trainer publishes it."""
        arrays = {name: tensor.numpy() for name, tensor in self._state.items()}
        for array in arrays.values():
            array.flags.writeable = False
        return arrays


class Receiver:
    """Copies arrays into tensors of its own in place, as an engine does."""

    def __init__(self, megabytes: int) -> None:
        self._state = state(megabytes)

    def load(self, arrays: dict[str, Any]) -> float:
        """Copy arrays into the state; returns seconds."""
        from scalerl.rollout.weights import tensor_of

        started = time.perf_counter()
        for name, array in arrays.items():
            self._state[name].copy_(tensor_of(array))
        return time.perf_counter() - started


def objects(megabytes: int, repeats: int) -> None:
    """Print GB a second through Ray's object store."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False)
    sender, receiver = ray.remote(Sender).remote(megabytes), ray.remote(Receiver).remote(megabytes)
    size = sum(tensor.nbytes for tensor in state(megabytes).values()) / 1e9
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        published = sender.weights.remote()
        ray.wait([published], timeout=120, fetch_local=False)
        put = time.perf_counter()
        ray.get(receiver.load.remote(published), timeout=120)
        times.append((put - started, time.perf_counter() - put))
        del published
    best = min(times, key=sum)
    both = sorted(size / sum(pair) for pair in times)
    print(
        f"{size * 1e3:.0f} MB through Ray's object store, {repeats} times: put {size / best[0]:.2f} GB/s, get and copy "
        f"{size / best[1]:.2f} GB/s, publication median {both[len(both) // 2]:.2f}, best {both[-1]:.2f} GB/s"
    )
    ray.shutdown()


def member(rank: int, folder: str, megabytes: int, repeats: int) -> None:
    """Play one end of the channel."""
    import torch

    from scalerl.rollout import weight_channel

    torch.set_num_threads(1)
    tensors = state(megabytes)
    channel = weight_channel.join(
        f"file://{folder}/meet", rank=rank, world_size=2, device=torch.device("cpu"), deadline_s=60.0
    )
    for version in range(1, repeats + 1):
        if rank == 0:
            done = channel.send(version, tensors, torch.float32)
            print(done.bytes / done.seconds / 1e9, flush=True)
            continue
        for bucket in channel.receive(version):
            for name, tensor in bucket:
                tensors[name].copy_(tensor)


def channel(megabytes: int, repeats: int) -> None:
    """Print GB a second through the weight channel over gloo."""
    size = sum(tensor.nbytes for tensor in state(megabytes).values()) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "member",
            "--folder",
            folder,
            "--megabytes",
            str(megabytes),
            "--repeats",
            str(repeats),
        ]
        peers = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
        ]
        speeds = sorted(float(line) for line in peers[0].communicate(timeout=300)[0].split())
        peers[1].wait(timeout=60)
    print(
        f"{size:.0f} MB in buckets over gloo, {repeats} times: median {speeds[len(speeds) // 2]:.2f}, best {speeds[-1]:.2f} GB/s"
    )


def main() -> None:
    """Measure both ways, or be one member of the channel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "objects", "channel", "member"))
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "member":
        member(options.rank, options.folder, options.megabytes, options.repeats)
    if options.what in ("all", "objects"):
        objects(options.megabytes, options.repeats)
    if options.what in ("all", "channel"):
        channel(options.megabytes, options.repeats)


if __name__ == "__main__":
    main()
