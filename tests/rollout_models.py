"""Tiny models, tokenizers and reference computations for the tests of the rollout."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from scalerl import streams
from scalerl.data import arithmetic
from scalerl.rollout.torch_engine import TorchEngine
from scalerl.rollout.trace import Trace, TraceRequest

# `</think>` is several tokens here, with several spellings: letters, and pieces that reach over its ends.
SPELLED = ["<pad>", "<eos>", *"</>think", "</", "k>1", "a", "b", "1", "2", "<think>", ">a<"]
SPELLED_ID = {token: index for index, token in enumerate(SPELLED)}


def character_tokenizer() -> Any:
    """The embedded task's tokenizer: `</think>` is one token."""
    return arithmetic.tokenizer()


def spelling_tokenizer() -> Any:
    """A tokenizer without a token for `</think>`."""
    core = Tokenizer(models.WordLevel(dict(SPELLED_ID), unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<think>|."), "isolated")
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def tiny_model(
    kind: str,
    vocabulary: int = len(arithmetic.VOCABULARY),
    seed: int = 0,
    eos: int = arithmetic.EOS,
    width: int = 32,
    heads: int = 4,
) -> Any:
    """A random model of two layers: llama, llama-tied, qwen2 (grouped heads, biases) or gpt-neox; sharp enough to matter."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "max_position_embeddings": 256,
        "eos_token_id": eos,
        "bos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": kind == "llama-tied",
    }
    if kind == "gpt-neox":
        model: Any = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**common))
    elif kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common, num_key_value_heads=heads // 2))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, num_key_value_heads=heads // 2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def successor_model(chain: dict[int, int], vocabulary: int, eos: int, **shape: int) -> Any:
    """A Llama that follows every token by one other, almost surely: attention and MLP write nothing, so the head sees the token alone."""
    model = tiny_model("llama", vocabulary, eos=eos, **shape)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, model.config.hidden_size))
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.zero_()
        for token, successor in chain.items():
            model.lm_head.weight[successor, token] = 20
    return model


def engine(model: Any, tokenizer: Any = None, **options: Any) -> TorchEngine:
    """An engine on a copy of the model."""
    settings = {
        "slots": 8,
        "temperature": 0.8,
        "head_dtype": "float32",
        "max_tokens": 64,
        "phrase": arithmetic.PHRASE,
        **options,
    }
    return TorchEngine(copy.deepcopy(model), tokenizer or character_tokenizer(), **settings)


def requests(count: int, group: int = 4, first: int = 0, seed: int = 0, think: bool = True) -> list[TraceRequest]:
    """Requests of several groups: prompts of 2 to 9 tokens, thinking budgets of -1 or 0 to 14, answer budgets of 1 to 6."""
    made = []
    for number in range(first, first + count):
        rng = np.random.default_rng([seed, number // group])
        prompt = [*rng.integers(5, 21, rng.integers(1, 9)).tolist(), arithmetic.THINK if think else 5]
        own = np.random.default_rng([seed, number, 1])
        limit = int(own.integers(0, 15)) if own.random() < 0.8 else -1
        answer = int(own.integers(1, 7))
        stream = streams.key(seed, "trace", number)
        made.append(
            TraceRequest(number // group, f"p{number // group}", number % group, tuple(prompt), stream, limit, answer)
        )
    return made


def run(target: TorchEngine, chunk: int = 5) -> list[Trace]:
    """Decode until nothing is pending; fails where it never ends."""
    traces: list[Trace] = []
    for _ in range(1000):
        if not target.pending:
            return traces
        traces += target.step(chunk)
    raise AssertionError("traces never end")


@torch.no_grad()
def forward_logprobs(model: Any, trace: Trace, temperature: float, head_float32: bool = True) -> np.ndarray:
    """Log-probabilities over the vocabulary at each completion token, float64 [T, V], by one plain forward pass of transformers."""
    ids = torch.tensor([[*trace.request.prompt_tokens, *trace.tokens.tolist()]])
    if head_float32:
        hidden = model.base_model(input_ids=ids).last_hidden_state[0].float()
        logits = hidden @ model.get_output_embeddings().weight.float().T
    else:
        logits = model(input_ids=ids).logits[0]
    start = len(trace.request.prompt_tokens) - 1
    return torch.log_softmax(logits[start:-1].double() / temperature, -1).numpy()


def chosen(logprobs: np.ndarray, trace: Trace) -> np.ndarray:
    """The traces' own tokens' log-probabilities, 0 at forced ones, [T]."""
    own = logprobs[np.arange(len(trace)), trace.tokens]
    return np.where(trace.forced, 0.0, own)


def state(model: Any, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Weights as the trainer publishes them, all multiplied by `scale`."""
    return {name: (parameter.detach() * scale).numpy() for name, parameter in model.named_parameters()}


def expected_finish(trace: Trace, phrase: Sequence[int], ends: set[int], max_tokens: int, texts: Sequence[str]) -> str:
    """Judge by the text, token by token, what should have happened; raises AssertionError at the first token that breaks a rule."""
    request, text, opened, closed_at, forced = trace.request, "", None, None, 0
    if request.prompt_tokens and texts[request.prompt_tokens[-1]] == "<think>":
        opened = 0
    for index, token in enumerate(trace.tokens.tolist()):
        thinking = opened is not None and closed_at is None
        due = thinking and 0 <= request.think_limit <= index - (opened or 0)
        assert bool(trace.forced[index]) == due
        if due:
            assert token == phrase[forced]
            forced += 1
            if forced == len(phrase):
                closed_at = index + 1
        else:
            assert forced in (0, len(phrase))
            text += texts[token]
            if closed_at is None and "</think>" in text:
                closed_at = index + 1
            elif opened is None and "<think>" in text:
                opened = index + 1
        last = index == len(trace) - 1
        if token in ends and not due:
            assert last
            return "interrupted_ended" if forced else "ended"
        full = len(request.prompt_tokens) + index + 1 >= max_tokens or index + 1 == request.completion_tokens
        if full or (closed_at is not None and index + 1 - closed_at >= request.answer_tokens):
            assert last
            return "truncated"
    return "unfinished"
