"""From a prompt to the token ids that the policy reads."""

from typing import Any

from scalerl.data.prompt import Prompt
from scalerl.recipe import Rollout
from warehouse.errors import UserError

THINK = "<think>"
THINK_CLOSE = "</think>"


def render(prompt: Prompt, tokenizer: Any, rollout: Rollout) -> list[int]:
    """Return the token ids of a prompt.

    "plain" is the text of the problem itself, with the special tokens that the tokenizer puts around any text; "chat" is the model's own chat
    template with the recipe's system prompt and `chat_template_kwargs`. `<think>` is appended where the recipe asks for it and the template has not done so.
    Raises UserError for a tokenizer without a chat template, and where template and recipe disagree on the think part.
    """
    text = render_text(prompt, tokenizer, rollout)
    plain = rollout.prompt_template == "plain"
    return list(tokenizer(text, add_special_tokens=plain).input_ids)


def render_text(prompt: Prompt, tokenizer: Any, rollout: Rollout) -> str:
    """Return the text that is encoded: the problem, or the filled chat template, with `<think>` where it belongs."""
    if rollout.prompt_template == "plain":
        text = prompt.problem
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                'rollout.prompt_template = "chat", but this model\'s tokenizer has no chat template; set rollout.prompt_template=plain'
            )
        turns = [dict(turn) for turn in prompt.messages]
        if rollout.system_prompt:
            turns.insert(0, {"role": "system", "content": rollout.system_prompt})
        options = dict(rollout.chat_template_kwargs)
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
        _refuse_disagreement(text, rollout)
    opened = text.rstrip().endswith(THINK)
    return text if opened or not rollout.think_in_prompt else text + THINK


def _refuse_disagreement(text: str, rollout: Rollout) -> None:
    """Raise UserError where the template opens or closes the think part against the recipe: completions would be split at the wrong place."""
    end = text.rstrip()
    if rollout.think_in_prompt and end.endswith(THINK_CLOSE):
        raise UserError(
            "this model's chat template closes the think part in the prompt (thinking is off); set rollout.think_in_prompt=false, "
            "or switch thinking on: rollout.chat_template_kwargs.enable_thinking=true"
        )
    if not rollout.think_in_prompt and end.endswith(THINK):
        raise UserError(
            "this model's chat template opens '<think>' itself; set rollout.think_in_prompt=true, or switch thinking off with rollout.chat_template_kwargs"
        )
