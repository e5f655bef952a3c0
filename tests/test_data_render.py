"""Rendering: the token ids that the policy reads."""

import pytest

from scalerl.data import arithmetic
from scalerl.data.prompt import make_prompt
from scalerl.data.render import render, render_text
from scalerl.recipe import Rollout
from warehouse.errors import UserError

PROMPT = make_prompt("23+58=", "81", source="arithmetic")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def test_plain_is_the_text_between_bos_and_the_think_mark() -> None:
    rollout = Rollout(prompt_template="plain")
    ids = render(PROMPT, arithmetic.tokenizer(), rollout)
    assert ids == [arithmetic.BOS, *arithmetic.encode("23+58="), arithmetic.THINK]
    bare = render(PROMPT, arithmetic.tokenizer(), Rollout(prompt_template="plain", think_in_prompt=False))
    assert bare == ids[:-1]


def test_chat_fills_the_template_once_with_the_system_prompt() -> None:
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = TEMPLATE
    rollout = Rollout(prompt_template="chat", system_prompt="top", think_in_prompt=False)
    assert render_text(PROMPT, tokenizer, rollout) == "stop;u23+58=;="
    tokenizer.chat_template = TEMPLATE.replace("u", "s") + "<think>"
    rollout = Rollout(prompt_template="chat")
    # The template opens the think part itself: it is not opened twice.
    assert render_text(PROMPT, tokenizer, rollout) == "u23+58=;=<think>"


def test_chat_adds_no_special_token_of_its_own() -> None:
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = "<bos>{{ messages[0]['content'] }}"
    ids = render(PROMPT, tokenizer, Rollout(prompt_template="chat"))
    assert ids == [arithmetic.BOS, *arithmetic.encode("23+58="), arithmetic.THINK]


def test_a_tokenizer_without_a_template_is_one_clear_line() -> None:
    with pytest.raises(UserError, match=r"no chat template; set rollout\.prompt_template=plain"):
        render(PROMPT, arithmetic.tokenizer(), Rollout(prompt_template="chat"))


NATIVE = (
    "{{ messages[0]['content'] }}={% if thinking is defined and thinking %}<think>{% else %}<think></think>{% endif %}"
)


def test_a_native_think_mode_is_switched_by_the_templates_own_arguments() -> None:
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = NATIVE
    on = Rollout(prompt_template="chat", chat_template_kwargs={"thinking": True})
    assert render_text(PROMPT, tokenizer, on) == "23+58==<think>"
    assert render(PROMPT, tokenizer, on) == [*arithmetic.encode("23+58=="), arithmetic.THINK]
    off = Rollout(prompt_template="chat", think_in_prompt=False)
    assert render_text(PROMPT, tokenizer, off) == "23+58==<think></think>"


def test_template_and_recipe_must_agree_on_the_think_part() -> None:
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = NATIVE
    with pytest.raises(UserError, match="closes the think part"):
        render_text(PROMPT, tokenizer, Rollout(prompt_template="chat"))
    with pytest.raises(UserError, match="opens '<think>' itself"):
        render_text(
            PROMPT,
            tokenizer,
            Rollout(prompt_template="chat", think_in_prompt=False, chat_template_kwargs={"thinking": True}),
        )
