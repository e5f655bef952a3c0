"""The trainer: one optimiser step per batch of judged groups, on one rank or sharded over several.

An update always advances the policy version, also when there is nothing to learn from or when a gradient is not finite: the weights then stay as
they are, and the row says `updated = False`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.learner import checkpoint, layout, probe, sharding
from scalerl.learner.batch import Selection, TrainGroup, select
from scalerl.learner.layout import MicroBatch
from scalerl.learner.losses import token_loss
from scalerl.learner.policy import Policy, can_share_prompts
from scalerl.recipe import Recipe
from scalerl.rollout.trace import Trace


class Trainer:
    """Holds the policy's fp32 weights and AdamW (section 3: constant lr after a linear warm-up).

    With `world_size` > 1 each rank makes one, naming the same `init_file` (`one_host`: all on this machine), and every method is called by all ranks with the same arguments.
    `version` is the number of updates done; `parameters` the number of weights; `tokenizer` that of the model.
    """

    def __init__(
        self,
        model_folder: Path,
        recipe: Recipe,
        *,
        device: str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        init_file: Path | None = None,
        one_host: bool = True,
    ):
        """Load the model; raises UserError for a folder without one and for a model that cannot be trained, ValueError for ranks without a meeting place."""
        from transformers import AutoTokenizer

        self.recipe, self.rank, self.world_size, self._one_host = recipe, rank, world_size, one_host
        self.device = torch.device(device)
        self.version = 0
        model = checkpoint.load_model(Path(model_folder)).to(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._policy = self._make_policy(model, init_file)
        # Tied weights appear once, under the first of their names.
        self._named = dict(self._policy.model.named_parameters())
        self._optimizer = self._make_optimizer()

    def _make_policy(self, model: Any, init_file: Path | None) -> Policy:
        recipe, sharded = self.recipe, self.world_size > 1
        policy = Policy(
            model,
            body_dtype=recipe.model.body_dtype,
            head_dtype=recipe.model.head_dtype,
            temperature=recipe.rollout.temperature,
            sharded=sharded,
        ).eval()
        probe.refuse_unfit(model)
        asks = not sharded and not recipe.training.activation_checkpointing
        # Once for a run: of other weights a model near the bound could answer otherwise, and a resumed run would round otherwise than an unbroken one.
        self._layouts_agree = probe.layouts_agree(model) if asks else None
        if recipe.training.activation_checkpointing:
            policy.save_memory()
        if sharded:
            if init_file is None:
                raise ValueError("several ranks need init_file, a path on a disk that all of them see")
            deadline_s = recipe.execution.update_deadline_s
            sharding.join(self.device, self.rank, self.world_size, init_file, deadline_s, self._one_host)
            sharding.shard(policy, self.device, self.world_size, recipe.model.body_dtype)
        return policy

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.recipe.optimizer
        return torch.optim.AdamW(
            self._named.values(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=self.world_size == 1,
        )

    def learning_rate(self) -> float:
        """Return the learning rate of the coming update: linear warm-up from lr / warmup_steps, then constant."""
        optimizer = self.recipe.optimizer
        return optimizer.lr * min(1.0, (self.version + 1) / max(1, optimizer.warmup_steps))

    def update(self, groups: list[TrainGroup]) -> dict[str, Any]:
        """Take one optimiser step on a batch and return its metrics, named as the columns of train_steps.

        What cannot be measured (an empty batch, numbers that are not finite) is left out of the metrics.
        """
        selection = select(groups, self.recipe.loss)
        metrics: dict[str, Any] = {**selection.counts, "lr": self.learning_rate(), "updated": False}
        if selection.traces:
            measured = self._gradients(selection)
            norm = self._gradient_norm()
            metrics |= {**measured, "grad_norm": norm}
            if math.isfinite(norm) and math.isfinite(measured["loss"]):
                self._step(metrics["lr"], norm)
                metrics["updated"] = True
            else:
                metrics["reason"] = f"not finite: loss {measured['loss']:g}, gradient norm {norm:g}"
            self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return {name: value for name, value in metrics.items() if isinstance(value, str) or math.isfinite(value)}

    def _step(self, lr: float, norm: float) -> None:
        limit = self.recipe.optimizer.grad_clip
        if limit and norm > limit:
            for parameter in self._named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def _gradient_norm(self) -> float:
        gradients = [parameter.grad for parameter in self._named.values() if parameter.grad is not None]
        return float(checkpoint.whole(torch.nn.utils.get_total_norm(gradients)))

    def _gradients(self, selection: Selection) -> dict[str, float]:
        """Accumulate the gradients of all micro-batches; return loss, ratio, gap and entropy over all ranks."""
        sums = torch.zeros(8, dtype=torch.float64, device=self.device)
        maxima = torch.full((3,), -math.inf, dtype=torch.float64, device=self.device)
        for batch, counts in self._micro_batches(selection.traces):
            added, largest = self._backward(batch.to(self.device), selection, counts)
            sums += added
            torch.maximum(maxima, largest, out=maxima)
        if self.world_size > 1:
            sharding.reduce_metrics(sums, maxima)
        loss, tokens, read, ratio, used, clipped, gap, entropy = sums.tolist()
        ratio_max, gap_max, minus_ratio_min = maxima.tolist()
        return {
            "loss": loss,
            "ratio_mean": ratio / tokens,
            "ratio_max": ratio_max,
            "ratio_min": -minus_ratio_min,
            "ratio_clipped_mean": used / tokens,
            "ratio_clipped_share": clipped / tokens,
            "logprob_gap_mean": gap / tokens,
            "logprob_gap_max": gap_max,
            "train_entropy": entropy / tokens,
            "tokens_read": round(read),
        }

    def _micro_batches(self, traces: list[Trace]) -> list[tuple[MicroBatch, bool]]:
        """Lay out this rank's traces. The flag is False for a repeated micro-batch that only keeps ranks in step."""
        limit = self.recipe.training.micro_batch_tokens
        if self.world_size == 1:
            longest = max(len(trace.request.prompt_tokens) + len(trace) for trace in traces)
            may_share = self._layouts_agree and can_share_prompts(self._policy.model.config, longest)
            pieces, shared = (
                layout.micro_batches(traces, limit) if may_share else (layout.cut(traces, limit, False), False)
            )
            return [(layout.collate(traces, piece, shared), True) for piece in pieces]
        shares = sharding.share(traces, self.world_size)
        cuts = [
            [
                np.concatenate([numbers[row] for row in piece])
                for piece in layout.cut([traces[n] for n in numbers], limit, shared=False)
            ]
            for numbers in shares
        ]
        most = max(map(len, cuts))
        mine = [(piece, True) for piece in cuts[self.rank]]
        # Every rank joins every gather, so all run the same number of forward passes.
        mine += [(np.array([0]), False)] * (most - len(mine))
        return [(layout.collate(traces, piece, shared=False), counts) for piece, counts in mine]

    def _backward(self, batch: MicroBatch, selection: Selection, counts: bool) -> tuple[Tensor, Tensor]:
        """Run one micro-batch forward and backward; return what it adds to the sums and its maxima, both float64."""
        made = self._policy(batch.rows, batch.index, batch.targets)
        logprobs, entropy = (part.index_select(0, batch.predictions) for part in made)
        behaviour = batch.behaviour.to(logprobs.dtype)
        chosen = batch.chosen[batch.traces].cpu()
        advantages = selection.advantages[chosen].to(logprobs)
        weights = selection.weights[chosen].to(logprobs) * counts
        reference = behaviour if self.recipe.loss.ratio == "generator" else logprobs.detach()
        out = token_loss(self.recipe.loss, logprobs, reference, advantages, batch.traces)
        loss = (out.values * weights).sum()
        (loss * self.world_size).backward()  # ranks are averaged, but their losses are parts of one sum
        gap = (logprobs.detach() - behaviour).abs()
        sizes = torch.tensor([len(gap), batch.tokens_read], dtype=torch.float64, device=gap.device)
        rest = [part.double().sum() for part in (out.ratio, out.used, out.clipped, gap, entropy)]
        sums = torch.stack([loss.detach().double(), *sizes, *rest]) * counts
        # A repeated micro-batch counts in no sum; its extremes are those of a trace that is counted elsewhere, so they may stay.
        return sums, torch.stack([out.ratio.max(), gap.max(), -out.ratio.min()]).double()

    @torch.no_grad()
    def score(self, traces: list[Trace]) -> list[np.ndarray]:
        """Return for each trace the log-probabilities of its own (not forced) tokens under the present weights, float32, in the order of its tokens.

        Laid out as an update lays out a batch of these traces, so they are the very numbers that the update would use. On one rank only.
        """
        scores = [np.zeros(0, np.float32)] * len(traces)
        for batch, _ in self._micro_batches(traces) if traces else []:
            moved = batch.to(self.device)
            made, _ = self._policy(moved.rows, moved.index, moved.targets)
            logprobs = made[moved.predictions].float().cpu().numpy()
            owners = batch.traces.numpy()
            for position, number in enumerate(batch.chosen.tolist()):
                scores[number] = logprobs[owners == position]
        return scores

    def weights(self, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the policy's weights by the model's own names, a tied head once: fp32, or bf16 viewed as uint16.

        The arrays are read-only, and copies unless `copy` is False: they may then change with the next update. All ranks must call; only rank 0 gets them, the others an
        empty dictionary.
        """
        arrays = {}
        for name, weight in self._policy_weights(copy):
            bits = weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight
            array = bits.cpu().numpy()
            array.flags.writeable = False
            arrays[name] = array
        return arrays

    def channel_state(self) -> tuple[dict[str, Tensor], torch.dtype]:
        """Return the parameters by the model's own names (shards where there are several ranks) and the dtype that generators run them in."""
        return self._named, self._policy.body_dtype

    def _policy_weights(self, copy: bool = True) -> list[tuple[str, Tensor]]:
        dtype = self._policy.body_dtype
        return [(name, full.to(dtype, copy=copy)) for name, full in checkpoint.gathered(self._named, self.rank == 0)]

    def save(self, folder: Path) -> None:
        """Write hf/, this rank's part of the optimiser and, last, trainer.json into a folder; the caller publishes it. All ranks must call."""
        folder = Path(folder)
        weights = dict(self._policy_weights())
        state = checkpoint.optimizer_state(self._optimizer, self._named)
        checkpoint.write_part(folder, state, self.rank, self.world_size)
        if self.rank == 0:
            checkpoint.save_policy(self._policy.model, weights, self.tokenizer, folder / "hf")
        if self.world_size > 1:
            sharding.wait_for_all(self.device)
        if self.rank == 0:
            checkpoint.write_done(folder, self.version, self.world_size, self._layouts_agree)

    def load(self, folder: Path) -> None:
        """Go on from a saved folder, bit by bit on as many ranks; raises UserError for a folder without a checkpoint or of another model."""
        parts, self.version, known = checkpoint.read_state(Path(folder))
        if known is not None and self._layouts_agree is not None:  # None where this trainer does not share anyway
            self._layouts_agree = known
        checkpoint.restore_optimizer(self._optimizer, self._named, parts)

    def close(self) -> None:
        """Part from the other ranks; nothing to do on one."""
        if self.world_size > 1:
            sharding.leave()
