"""The shape of a model: what its config.json says, as far as memory and arithmetic depend on it."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl import hub
from scalerl.recipe import Model
from warehouse.errors import UserError

# Decoders with RMSNorm, gated MLPs and grouped-query attention; the counting below is theirs.
KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "llama4_text")


@dataclass(frozen=True)
class Shape:
    """A decoder. `experts` 0 is dense; else every layer has that many gated MLPs of `mlp`, `chosen` of them per token, and a `shared_mlp` for all tokens."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    chosen: int = 0
    shared_mlp: int = 0

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = queries + 2 * keys if self.qkv_bias else 0
        return self.width * (2 * queries + 2 * keys) + biases + (2 * self.head_dim if self.qk_norm else 0)

    def feed_forward(self, experts: int) -> int:
        """Parameters of one layer's MLP with that many of its experts (a dense model has none and one MLP), router included."""
        one = 3 * self.width
        return (
            one * self.mlp
            if not self.experts
            else one * (experts * self.mlp + self.shared_mlp) + self.width * self.experts
        )

    @property
    def layer(self) -> int:
        """Parameters of one layer, with its two norms."""
        return self.attention + self.feed_forward(self.experts) + 2 * self.width

    @property
    def head(self) -> int:
        """Elements of the LM head's matrix."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer + (1 if self.tied else 2) * self.head + self.width

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: no embedding table, only the chosen experts."""
        return self.layers * (self.attention + self.feed_forward(self.chosen)) + self.head

    def touched(self, tokens: float) -> float:
        """Parameters read in a step of so many tokens: with independent choices an expert is missed by all with (1 - chosen / experts)^tokens."""
        share = 1 - (1 - self.chosen / self.experts) ** tokens if self.experts else 0.0
        unused = self.feed_forward(self.experts) - self.feed_forward(0) if self.experts else 0
        return self.layers * (self.attention + self.feed_forward(self.experts) - (1 - share) * unused) + self.head

    def kv_bytes(self, element: int = 2) -> int:
        """Bytes of keys and values per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element


NAMED = {
    shape.name: shape
    for shape in (
        # Qwen2.5-0.5B, Llama-3.1-8B and -70B, and the text model of Llama-4-Scout-17B-16E: their config.json.
        Shape("0.5B", 24, 896, 14, 2, 64, 4864, 151_936, True, qkv_bias=True),
        Shape("8B", 32, 4096, 32, 8, 128, 14_336, 128_256, False),
        Shape("70B", 80, 8192, 64, 8, 128, 28_672, 128_256, False),
        Shape("17Bx16", 48, 5120, 40, 8, 128, 8192, 202_048, False, experts=16, chosen=1, shared_mlp=8192),
    )
}


def find(text: str, revision: str = "") -> Shape:
    """Return the shape of a built-in name, of a checkpoint folder (or its config.json), or of a hub name OWNER/NAME, also OWNER/NAME@COMMIT.

    Of a hub's checkpoint the config.json alone is read, from the cache or from the hub. Raises UserError.
    """
    by_name = {name.lower(): shape for name, shape in NAMED.items()}
    if text.lower() in by_name:
        return by_name[text.lower()]
    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    name, _, commit = text.partition("@")
    if hub.is_name(name) and not path.is_file():
        return _read(hub.config_file(name, commit or revision), name)
    if not path.is_file():
        near = difflib.get_close_matches(text.lower(), by_name, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"model {text!r}: {hint}give one of {', '.join(NAMED)}, a folder with a config.json, or OWNER/NAME[@COMMIT] of the hub"
        )
    return _read(path, str(path.parent.name))


def _read(config: Path, name: str) -> Shape:
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise UserError(f"model {config}: not valid JSON ({error})") from None
    return of_config(content, name)


def of_config(content: dict[str, Any], name: str) -> Shape:
    """Return the shape that a config.json describes. Raises UserError for a family that is counted otherwise, or a missing field."""
    if isinstance(content.get("text_config"), dict):
        content = content["text_config"]
    kind = content.get("model_type")
    if kind not in KNOWN_TYPES:
        raise UserError(
            f"model {name}: model_type {kind!r} is not counted here; known: {', '.join(KNOWN_TYPES)}; take the nearest of {', '.join(NAMED)}"
        )
    try:
        width, heads = int(content["hidden_size"]), int(content["num_attention_heads"])
        experts = int(content.get("num_local_experts") or content.get("num_experts") or 0)
        mlp = (
            int(content.get("moe_intermediate_size") or content["intermediate_size"])
            if experts
            else int(content["intermediate_size"])
        )
        return Shape(
            name,
            int(content["num_hidden_layers"]),
            width,
            heads,
            int(content.get("num_key_value_heads") or heads),
            int(content.get("head_dim") or width // heads),
            mlp,
            int(content["vocab_size"]),
            bool(content.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(content.get("attention_bias")),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            experts=experts,
            chosen=int(content.get("num_experts_per_tok") or 1) if experts else 0,
            shared_mlp=mlp if kind == "llama4_text" else 0,
        )
    except KeyError as error:
        raise UserError(f"model {name}: its config.json has no {error.args[0]}") from None


def of_recipe(model: Model) -> Shape:
    """Return the shape of a recipe's model: that of its folder or hub name, the tiny Llama that it makes, or SmolLM2-135M. Raises UserError."""
    if model.kind == "tiny-llama":
        head_dim = model.width // model.heads
        return Shape("tiny", model.layers, model.width, model.heads, model.heads, head_dim, 2 * model.width, 32, False)
    if model.kind == "smollm2":
        return Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49_152, True)
    if not model.path:
        return NAMED["8B"]
    return find(model.path, model.revision)
