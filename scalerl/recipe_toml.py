"""A recipe written out as TOML, every knob resolved: what a run keeps of itself, and what `scalerl recipe show` prints.

Reading the text back with `scalerl.recipe.load` gives an equal recipe, so a run can be resumed from its own folder.
"""

import json
from typing import Any

from scalerl.recipe import Recipe


def to_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML: name and seed first, then one table a section, in the recipe's order."""
    content = recipe.model_dump(mode="json")
    plain = [_line(name, value) for name, value in content.items() if not isinstance(value, dict)]
    tables = [
        "\n".join([f"\n[{section}]", *(_line(name, value) for name, value in knobs.items())])
        for section, knobs in content.items()
        if isinstance(knobs, dict)
    ]
    return "\n".join([*plain, *tables]) + "\n"


def _line(name: str, value: Any) -> str:
    """JSON's strings, numbers, booleans and lists are TOML too, but for the delete character, which TOML wants escaped."""
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
