"""Rates of generators and trainer from shapes and data sheets: a roofline (Williams et al. 2009), not a measurement.

A decode step reads the weights once and the keys and values of every trace in flight, so a generator's tokens per second first grow with the traces in flight,
then flatten as reading their caches takes over, and stop at what the arithmetic allows. An update costs 6 FLOPs a parameter and token (2 forward, 4 backward; 8
with activations computed again), and attention over what came before; gathering sharded weights runs beside it and counts where it is slower. New weights travel
as a broadcast, whose time does not depend on the number of receivers.
"""

from dataclasses import dataclass, field
from typing import Any

from scalerl.planning.devices import Device, Efficiency
from scalerl.planning.lengths import Lengths
from scalerl.planning.memory import element
from scalerl.planning.shape import Shape
from scalerl.recipe import Recipe


@dataclass(frozen=True)
class Machine:
    """A model on a kind of device, with the work of a recipe: what all rates follow from."""

    shape: Shape
    device: Device
    recipe: Recipe
    lengths: Lengths
    prompt: float
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def resident(self) -> float:
        """Mean tokens of a trace in flight, prompt included."""
        return self.prompt + self.lengths.resident

    def decode_s(self, rows: float, devices: int) -> tuple[float, float]:
        """Return (by bandwidth, by arithmetic) seconds of a decode step with `rows` traces on a generator of so many devices."""
        body, efficiency = element(self.recipe), self.efficiency
        read = body * self.shape.touched(rows) + rows * self.shape.kv_bytes(body) * self.resident
        bandwidth = read / (self.device.bandwidth * efficiency.decode * devices) + efficiency.decode_overhead_s
        return bandwidth, rows * self._token_flops(self.resident) / (self.device.flops * efficiency.prefill * devices)

    def _token_flops(self, context: float) -> float:
        """Return the FLOPs of one token forward, attending to `context` tokens."""
        attention = 4 * self.shape.layers * self.shape.heads * self.shape.head_dim * context
        return 2 * self.shape.active + attention

    def update_s(self, tokens: float, ranks: int) -> tuple[float, float]:
        """Return (by arithmetic, by communication) seconds of an update on so many trained tokens, over `ranks` devices."""
        training, efficiency = self.recipe.training, self.efficiency
        passes = 4 if training.activation_checkpointing else 3
        mean = self.prompt + self.lengths.mean
        arithmetic = passes * tokens * (mean / self.lengths.mean) * self._token_flops(mean / 2)
        micro = max(1.0, tokens * (mean / self.lengths.mean) / ranks / training.micro_batch_tokens)
        body = element(self.recipe)
        # Every micro-batch gathers the weights forward and backward and scatters fp32 gradients; each rank moves (ranks - 1) / ranks of them.
        moved = micro * self.shape.parameters * (2 * body + 4) * (ranks - 1) / ranks
        wire = self.device.wire(ranks) * efficiency.wire
        return arithmetic / (self.device.flops * efficiency.train * ranks), moved / wire

    def push_s(self, devices: int) -> float:
        """Return the seconds in which new weights reach all generators, of `devices` devices in all."""
        return element(self.recipe) * self.shape.parameters / (self.device.wire(devices) * self.efficiency.wire)

    def rates(self, generator_devices: int, ranks: int, total: int) -> Any:
        """Return `Rates` of a generator and of the trainer for the simulator; the decode step is the line through one trace and full slots."""
        from scalerl.pipeline.simulator import Rates

        slots = max(2, self.recipe.rollout.slots)
        one, full = self.decode_s(1, generator_devices)[0], self.decode_s(slots, generator_devices)[0]
        row = (full - one) / (slots - 1)
        batch = self.recipe.training.prompts_per_step * self.recipe.rollout.group_size * self.lengths.mean
        prefill = self.prompt * self._token_flops(self.prompt / 2) / (self.device.flops * self.efficiency.prefill)
        return Rates(
            decode_step_s=one - row,
            decode_row_s=row,
            decode_floor_s=self.decode_s(1, generator_devices)[1],
            admit_s=prefill / generator_devices / self.recipe.rollout.group_size,
            update_s=0.0,
            update_token_s=max(self.update_s(batch, ranks)) / batch,
            push_s=self.push_s(total),
        )
