"""Generators and trainer as Ray actors; weights travel through the object store as read-only NumPy arrays."""

import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl.home import home as home_folder
from scalerl.pipeline import placement
from scalerl.pipeline.broadcast import Broadcast, TrainerEnd
from scalerl.pipeline.collector import spare_what_is_there
from scalerl.pipeline.fleet import Call, GeneratorLost, TrainerLost
from scalerl.pipeline.generator_node import GeneratorNode
from scalerl.recipe import Recipe
from scalerl.rollout.trace import Trace, TraceRequest
from scalerl.rollout.vllm_core import require_vllm
from scalerl.variables import object_store_bytes
from warehouse.errors import UserError

# Ray puts socket files below its temporary folder, and a socket's name holds 107 bytes at most.
LONGEST_RAY_FOLDER = 40
# How long a rank may take to say that it is alive.
PATIENCE_S = 5.0


def start_ray(recipe: Recipe, home: Path) -> None:
    """Join the cluster named by RAY_ADDRESS, or start one on this host with as many CPU slots as the recipe's actors hold."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would run its workers at niceness 15: a busy machine then starves the very processes whose time counts as compute.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if not os.environ.get("RAY_ADDRESS"):
        # Before the import: Ray's core reads the token's place when it is loaded.
        _use_token(home)
    import ray

    if placement.joins_cluster():
        ray.init(log_to_driver=True, namespace="scalerl")
        return
    folder = home / "ray"
    if len(str(folder)) > LONGEST_RAY_FOLDER:
        folder = Path(tempfile.gettempdir()) / f"scalerl-ray-{os.getuid()}"
    _remove_dead_sessions(folder)
    resources = recipe.resources
    devices = resources.generators * resources.generator_devices + resources.trainers * resources.trainer_devices
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(devices)),
        include_dashboard=False,
        _temp_dir=str(folder),
        namespace="scalerl",
        object_store_memory=object_store_bytes(),
    )


def _use_token(home: Path) -> None:
    """Keep Ray's token authentication on, with a token of this home: Ray's ports listen on all addresses whatever is asked."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = home / "ray-token"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(handle, secrets.token_hex(32).encode())
        os.close(handle)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _remove_dead_sessions(folder: Path) -> None:
    """Remove what Ray left of sessions whose process is gone; a session's name ends in its process id."""
    for session in folder.glob("session_*_*"):
        owner = session.name.rpartition("_")[2]
        if not session.is_symlink() and owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(session, ignore_errors=True)


def has_gpus() -> bool:
    """Say whether the Ray cluster has GPUs: devices are then GPUs, otherwise CPU cores."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def store_shortage(each: int, generators: int, calls: int, store: int) -> str:
    """Say in one line that Ray's object store may not hold the copies of the weights that can live at once; nothing where it does.

    each, store: bytes of one copy and of the store of a node; calls: calls that a generator may have under way. At once there can be the published weights, those of
    the update that has just ended, and for each call those that it brings: Ray keeps the arguments of a call, also of one that waits, until it has ended.
    """
    copies = 2 + calls * generators
    if copies * each <= store:
        return ""
    return (
        f"up to {copies} copies of the weights can live in Ray's object store at once, {each / 1e9:.2f} GB each, but it has {store / 1e9:.2f} GB; what finds no room goes to the disk, "
        f"which is slow. Set SCALERL_OBJECT_STORE_BYTES={copies * each} (on a cluster: ray start --object-store-memory), or execution.weight_transfer=channel"
    )


class TrainerNode:
    """One rank of the trainer in an actor of its own: one update, and (on rank 0) the weights that follow from it."""

    def __init__(
        self,
        model_folder: str,
        recipe: dict[str, Any],
        checkpoint: str | None,
        threads: int,
        rank: int = 0,
        world_size: int = 1,
        init_file: str = "",
        one_host: bool = True,
    ) -> None:
        import torch

        from scalerl.learner.trainer import Trainer
        from scalerl.recipe import parse

        torch.set_num_threads(threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._trainer = Trainer(
            Path(model_folder),
            parse(recipe, "trainer"),
            device=device,
            rank=rank,
            world_size=world_size,
            init_file=Path(init_file) if init_file else None,
            one_host=one_host,
        )
        if checkpoint:
            self._trainer.load(Path(checkpoint))
        execution = self._trainer.recipe.execution
        self._by_channel = execution.weight_transfer == "channel"
        self._end = TrainerEnd(self._trainer, execution.advance_deadline_s)
        self._publish_s = 0.0

    def describe(self) -> tuple[int, int]:
        """Return version and number of parameters; the first question that a fleet asks."""
        spare_what_is_there()
        return self._trainer.version, self._trainer.parameters

    def update(self, groups: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take one optimiser step; return metrics and the new weights. `publish_s` of the metrics covers what was sent by channel since the last."""
        started = time.monotonic()
        metrics = self._trainer.update(groups)
        updated = time.monotonic()
        # Ray has copied what is returned into its store before this actor does anything else.
        weights = {} if self._by_channel else self._trainer.weights(copy=False)
        ended = time.monotonic()
        publish_s, self._publish_s = self._publish_s + ended - updated, 0.0
        return metrics | {"busy_s": ended - started, "publish_s": publish_s}, weights

    def weights(self) -> dict[str, Any]:
        """Return the present weights."""
        return self._trainer.weights(copy=False)

    def present(self) -> tuple[int, dict[str, Any]]:
        """Return the version and the weights that belong to it; all ranks must call."""
        return self._trainer.version, self._trainer.weights(copy=False)

    def meeting(self, folder: str) -> str:
        """See TrainerEnd."""
        return self._end.meeting(folder)

    def join_channel(self, meeting: str, world_size: int) -> None:
        """See TrainerEnd."""
        self._end.join(meeting, world_size)

    def publish(self) -> str:
        """See TrainerEnd; a failure is printed here and noticed at the generators."""
        started = time.monotonic()
        failure = self._end.publish()
        self._publish_s += time.monotonic() - started
        if failure:
            print(failure, flush=True)
        return failure

    def alive(self) -> bool:
        """Answer beside an update, from a thread of its own: tells a rank that waits for another from one that is stopped."""
        return True

    def save(self, folder: str) -> None:
        """Write model, optimiser and counters."""
        self._trainer.save(Path(folder))


class RayFleet:
    """See Fleet; every call has the recipe's deadline."""

    def __init__(self, model_folder: Path, recipe: Recipe, checkpoint: Path | None) -> None:
        """Start the actors and wait until each has its model; raises UserError for a cluster that is too small and for a model that cannot be trained or run."""
        import ray

        if recipe.rollout.engine == "vllm":
            require_vllm()
        self.recipe = recipe
        self.generators = recipe.resources.generators
        self._ray = ray
        self._model_folder = str(checkpoint / "hf" if checkpoint else model_folder)
        self._content = recipe.model_dump(mode="json")
        self._gpus = has_gpus()
        self._placement = placement.reserve(recipe, self._gpus)
        self._trainers = self._start_trainers(checkpoint)
        self._nodes = [self._start_generator(index, 0) for index in range(self.generators)]
        self.version, self.parameters = self._begun([rank.describe.remote() for rank in self._trainers])[0]
        self._begun([node.ping.remote() for node in self._nodes])
        self._weights = self._on_all_ranks("weights")[0]
        self._broadcast: Broadcast | None = None
        if recipe.execution.weight_transfer == "channel":
            folder = tempfile.mkdtemp(prefix="scalerl-channel-") if self._placement.one_host else ""
            self._broadcast = Broadcast(ray, recipe, self._gpus, folder)
            self._broadcast.meet(self._trainers[0], self._nodes)
        spare_what_is_there()

    def store_bytes(self) -> int:
        """Return the bytes of the smallest object store on a node that can hold an actor of the run."""
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        device = "GPU" if self._gpus else "CPU"
        return min(int(one.get("object_store_memory", 0)) for one in resources if one.get(device))

    def _begun(self, replies: Sequence[Any]) -> list[Any]:
        """Return what fresh actors answer first; raises the UserError that one of them refused the recipe or the model with.

        Of what ends an actor while it is made Ray passes the text on alone, a traceback whose last line names the error.
        """
        try:
            return list(self._ray.get(list(replies), timeout=self.recipe.execution.start_deadline_s))
        except self._ray.exceptions.RayActorError as error:
            _, refused, told = str(error).rpartition(f"{UserError.__module__}.{UserError.__name__}: ")
            if refused:
                raise UserError(told.splitlines()[0]) from None
            raise

    def _start_trainers(self, checkpoint: Path | None) -> list[Any]:
        """Start one actor per rank; several meet through a file that is new for each fleet, on the disk that all nodes share."""
        resources = self.recipe.resources
        meeting = ""
        if resources.trainers > 1:
            shared = home_folder() / "ranks" if placement.joins_cluster() else Path(tempfile.gettempdir())
            shared.mkdir(parents=True, exist_ok=True)
            meeting = str(Path(tempfile.mkdtemp(prefix="scalerl-ranks-", dir=shared)) / "meet")
        return [
            self._actor(TrainerNode, resources.trainer_devices, "trainer", rank).remote(
                self._model_folder,
                self._content,
                str(checkpoint) if checkpoint else None,
                _threads(resources.trainer_devices),
                rank,
                resources.trainers,
                meeting,
                self._placement.one_host,
            )
            for rank in range(resources.trainers)
        ]

    def _on_all_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank (a collective one hangs unless all take part) and return the references, rank 0 first."""
        return [getattr(rank, method).remote(*arguments) for rank in self._trainers]

    def _actor(self, kind: type, devices: float, role: placement.Role = "generator", index: int = -1) -> Any:
        """Return the actor class with its devices, in the bundle `index` of its role; a negative one is for actors that hold nothing."""
        held = {"num_gpus": devices} if self._gpus else {"num_cpus": devices}
        threads = str(_threads(devices))
        variables = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        place = self._placement.options(role, index) if index >= 0 else {}
        watch: dict[str, Any] = {"concurrency_groups": {"watch": 1}} if kind is TrainerNode else {}
        actor: Any = self._ray.remote(**watch)(kind) if watch else self._ray.remote(kind)
        return actor.options(**held, **place, runtime_env={"env_vars": variables})

    def _start_generator(self, index: int, version: int) -> Any:
        devices = self.recipe.resources.generator_devices
        return self._actor(GeneratorNode, devices, "generator", index).remote(
            self._model_folder, self._content, version, _threads(devices)
        )

    def _call(self, role: str, index: int, reply: Any, deadline_s: float) -> Call:
        return Call(role, index, time.monotonic() + deadline_s, reply)

    def _weights_if(self, wanted: bool, generator: int) -> Any:
        received = self._broadcast is not None and generator in self._broadcast.received
        return self._weights if wanted and not received else None

    def advance(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int, decode_steps: int
    ) -> Call:
        """See Fleet."""
        reply = self._nodes[generator].advance.remote(
            list(requests), self._weights_if(new_weights, generator), version, decode_steps
        )
        return self._call("generator", generator, reply, self.recipe.execution.advance_deadline_s)

    def update(self, groups: list[Any]) -> Call:
        """See Fleet."""
        # One rank is given the batch with the call; several read the same copy from the store.
        batch = self._ray.put(groups) if len(self._trainers) > 1 else groups
        replies = [rank.update.options(num_returns=2).remote(batch) for rank in self._trainers]
        self._others = [metrics for metrics, _ in replies[1:]]
        self._next_weights = replies[0][1]
        return self._call("trainer", 0, replies[0][0], self.recipe.execution.update_deadline_s)

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """See Fleet."""
        by_reply = {call.reply: call for call in calls}
        ended, _ = self._ray.wait(list(by_reply), num_returns=1, timeout=timeout_s)
        return [by_reply[reply] for reply in ended]

    def result(self, call: Call) -> Any:
        """See Fleet."""
        if call.role == "generator":
            return self._await(call)
        reply = self._on_time(call, [call.reply, *self._others])[0]
        if self._broadcast is None:
            self._weights = self._next_weights
        else:
            self.version += 1
            self._broadcast.push(self.version, self._trainers, self._nodes)
        return reply

    def _await(self, call: Call) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call.reply, timeout=max(0.0, call.deadline - time.monotonic()))
        except errors.GetTimeoutError:
            seconds = time.monotonic() - call.started
            raise GeneratorLost(f"generator {call.index} has been silent for {seconds:.0f} s") from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, GeneratorLost):  # what it said itself, without Ray's traceback of many lines
                raise GeneratorLost(f"generator {call.index}: {error.cause}") from None
            raise
        except errors.RayError as error:
            raise GeneratorLost(f"generator {call.index} died: {type(error).__name__}") from None

    def _on_time(self, call: Call, replies: Sequence[Any]) -> list[Any]:
        """Return what every rank answered, rank 0 first; raises TrainerLost with the names of ranks that died or are silent.

        The other ranks of a dead one fail too, or wait for it in a collective; so all of them are looked at.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(list(replies), timeout=max(0.0, call.deadline - time.monotonic()))
        except errors.GetTimeoutError:
            seconds = time.monotonic() - call.started
            raise TrainerLost(f"the trainer has been silent for {seconds:.0f} s; {self._silent()}") from None
        except errors.RayError as error:
            dead = self._dead()
            if not dead and isinstance(error, errors.RayTaskError):
                raise
            what = f"trainer {', '.join(map(str, dead))} died" if dead else "a trainer was out of reach for a while"
            raise TrainerLost(f"{what}: {type(error).__name__}") from None

    def _alive(self) -> list[Any]:
        return [rank.alive.options(concurrency_group="watch").remote() for rank in self._trainers]

    def _silent(self) -> str:
        """Say which ranks do not even answer a question that needs no work: stopped, or cut off."""
        questions = self._alive()
        answered, _ = self._ray.wait(questions, num_returns=len(questions), timeout=PATIENCE_S)
        silent = [str(rank) for rank, question in enumerate(questions) if question not in answered]
        return f"trainer {', '.join(silent)} does not answer at all" if silent else "all ranks are alive and at work"

    def _dead(self) -> list[int]:
        dead = []
        for rank, question in enumerate(self._alive()):
            try:
                self._ray.get(question, timeout=PATIENCE_S)
            except self._ray.exceptions.RayActorError:
                dead.append(rank)
            except self._ray.exceptions.GetTimeoutError:
                continue
        return dead

    def replace(self, generator: int, version: int) -> Call:
        """See Fleet. Ray ends a stopped process too, by force after some seconds."""
        self._ray.kill(self._nodes[generator], no_restart=True)
        self._nodes[generator] = self._start_generator(generator, version)
        weights: Any = self._weights
        if self._broadcast is not None:
            # Behind an update that is under way the trainer's version is newer; tokens must carry the version that draws them.
            present = [rank.present.options(num_returns=2).remote() for rank in self._trainers]
            version, weights = present[0]
            self._broadcast.meet(self._trainers[0], self._nodes)
        reply = self._nodes[generator].advance.remote([], weights, version, 0)
        return self._call("generator", generator, reply, self.recipe.execution.start_deadline_s)

    def _get(self, reply: Any, generator: int = -1) -> Any:
        """Wait for what a generator returns, as `result` does; a negative number names one beside the fleet."""
        return self.result(self._call("generator", generator, reply, self.recipe.execution.advance_deadline_s))

    def unfinished(self, generator: int) -> list[Trace]:
        """See Fleet."""
        return self._get(self._nodes[generator].unfinished.remote(), generator)

    def rebuild(self, generator: int) -> None:
        """See Fleet."""
        self._get(self._nodes[generator].rebuild.remote(), generator)

    def drop(self, generator: int, group_ids: Sequence[int]) -> None:
        """See Fleet."""
        self._get(self._nodes[generator].drop.remote(list(group_ids)), generator)

    def start_evaluation(
        self,
        generator: int,
        requests: Sequence[TraceRequest],
        new_weights: bool,
        version: int,
        temperature: float | None = None,
    ) -> None:
        """See Fleet."""
        self._get(
            self._nodes[generator].start_evaluation.remote(
                list(requests), self._weights_if(new_weights, generator), version, temperature
            ),
            generator,
        )

    def advance_evaluation(self, generator: int, decode_steps: int) -> Call:
        """See Fleet."""
        reply = self._nodes[generator].advance_evaluation.remote(decode_steps)
        return self._call("generator", generator, reply, self.recipe.execution.advance_deadline_s)

    def save(self, folder: str) -> None:
        """See Fleet; raises TrainerLost for a dead or silent rank."""
        replies = self._on_all_ranks("save", folder)
        self._on_time(self._call("trainer", 0, replies[0], self.recipe.execution.update_deadline_s), replies)

    def evaluate_stored(
        self,
        model_folder: Path,
        version: int,
        requests: Sequence[TraceRequest],
        decode_steps: int,
        temperature: float | None = None,
    ) -> tuple[list[Trace], float]:
        """Evaluate a stored checkpoint by one more generator; return its traces and the mean entropy (nats per token)."""
        actor = self._actor(GeneratorNode, 0).remote(str(model_folder), self._content, version, 1)
        try:
            self._ray.get(actor.ping.remote(), timeout=self.recipe.execution.start_deadline_s)
            self._get(actor.start_evaluation.remote(list(requests), None, version, temperature))
            traces: list[Trace] = []
            entropy_sum, entropy_tokens = 0.0, 0
            while len(traces) < len(requests):
                advance = self._get(actor.advance_evaluation.remote(decode_steps))
                traces += advance.traces
                entropy_sum += advance.entropy_sum
                entropy_tokens += advance.entropy_tokens
        finally:
            self._ray.kill(actor, no_restart=True)
        traces.sort(key=lambda trace: (trace.request.group_id, trace.request.sample))
        return traces, entropy_sum / max(1, entropy_tokens)


def _threads(devices: float) -> int:
    return max(1, math.floor(devices))
