"""Bytes on a device of each role: what the trainer keeps per parameter and per token, what a generator keeps per trace.

Trainer (`scalerl.learner`): fp32 weights, gradients and AdamW's two moments, 16 bytes a parameter, sharded over all ranks (FSDP2, Rajbhandari et al. 2020,
stage 3). Gathered whole beside that: two neighbouring layers in the body's dtype, one layer's gradients, and the root group (embedding, head) all along. On one rank
nothing is sharded; a bf16 body then needs a rounded copy. Activations of a micro-batch: what PyTorch saves for the backward pass of a gated Llama layer
(see `saved_bytes`), with checkpointing only each layer's input and one layer's worth. Log-probabilities run over chunks of logits.

Generator: weights in the body's dtype, the fp32 copy of the head, keys and values. An engine with pages holds what traces in flight have by now (`Lengths.resident`);
the torch engine has a row as long as the longest trace for each.
"""

from dataclasses import dataclass

from scalerl.planning.shape import Shape
from scalerl.recipe import Recipe

# As scalerl.learner.logprobs.CHUNK_LOGITS, which cannot be imported without torch; a test compares them. Held at once: logits, probabilities, their gradient, its copy.
CHUNK_LOGITS = 1 << 25
CHUNK_COPIES = 4


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one trainer rank, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class GeneratorMemory:
    """Bytes on each device of one generator: weights, fp32 head, and keys and values of a mean and of a longest trace."""

    weights: float
    head: float
    trace: float
    longest_trace: float

    def fits(self, memory: float) -> int:
        """Return how many mean traces fit beside the weights; 0 where not even one of the longest does."""
        left = memory - self.weights - self.head
        return int(left // self.trace) if left >= self.longest_trace else 0


def element(recipe: Recipe) -> int:
    """Return the bytes of an element of the body."""
    return 2 if recipe.model.body_dtype == "bfloat16" else 4


def saved_bytes(shape: Shape, body: int) -> float:
    """Return the bytes per token that one layer saves for its backward pass.

    In elements of the body: inputs of the projections (2 width), queries, keys, values and the attention's answer, gate, its activation, up and their product for
    each MLP a token passes. The norms save their input in fp32, and in a narrower body the rounded result before it is weighted.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlps = shape.chosen * shape.mlp + shape.shared_mlp if shape.experts else shape.mlp
    norms = 2 * shape.width * (4 + body)
    return body * (2 * shape.width + 2 * queries + 2 * keys + 4 * mlps) + norms


def trainer(shape: Shape, recipe: Recipe, ranks: int, longest: int) -> TrainerMemory:
    """Return the bytes on one of `ranks` trainer ranks; `longest` is the longest sequence, which a micro-batch must hold whole."""
    body, training = element(recipe), recipe.training
    tokens = max(training.micro_batch_tokens, longest)
    root = (1 if shape.tied else 2) * shape.head
    head_bytes = 4 if recipe.model.head_dtype == "float32" else body
    gathered: float = body * (2 * shape.layer + root) + 4 * (shape.layer + root)
    if ranks == 1:
        gathered = body * shape.parameters if body == 2 else 0.0
    gathered += 2 * head_bytes * shape.head
    layer = saved_bytes(shape, body)
    per_token = shape.layers * body * shape.width + layer if training.activation_checkpointing else shape.layers * layer
    chunk = min(CHUNK_LOGITS, tokens * shape.vocabulary)
    share = shape.parameters / ranks
    return TrainerMemory(
        weights=4 * share,
        gradients=4 * share,
        optimizer=8 * share,
        gathered=gathered,
        activations=tokens * (per_token + 2 * head_bytes * shape.width),
        logits=4 * CHUNK_COPIES * chunk,
    )


def generator(shape: Shape, recipe: Recipe, devices: int, resident: float, longest: int) -> GeneratorMemory:
    """Return the bytes on each of a generator's devices; tensor parallelism splits all of it.

    resident: mean tokens that a trace in flight has, prompt included; longest: tokens of the longest sequence.
    """
    body = element(recipe)
    row = longest if recipe.rollout.engine == "torch" else resident
    return GeneratorMemory(
        weights=body * shape.parameters / devices,
        head=4 * shape.head / devices if recipe.model.head_dtype == "float32" and body == 2 else 0.0,
        trace=shape.kv_bytes(body) * min(row, longest) / devices,
        longest_trace=shape.kv_bytes(body) * longest / devices,
    )
