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
    tables = [_table(section, knobs) for section, knobs in content.items() if isinstance(knobs, dict)]
    return "\n".join([*plain, *tables]) + "\n"


def _table(section: str, knobs: dict[str, Any]) -> str:
    """Return one section; a list of entries in it follows as an array of tables."""
    entries = {name: value for name, value in knobs.items() if _is_entries(value)}
    lines = [f"\n[{section}]", *(_line(name, value) for name, value in knobs.items() if name not in entries)]
    for name, value in entries.items():
        for entry in value:
            lines += [f"\n[[{section}.{name}]]", *(_line(knob, content) for knob, content in entry.items())]
    return "\n".join(lines)


def _is_entries(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _line(name: str, value: Any) -> str:
    return f"{name} = {_value(value)}"


def _value(value: Any) -> str:
    """JSON's strings, numbers and booleans are TOML too, but for the delete character, which TOML wants escaped; tables are written in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(str(name))} = {_value(content)}" for name, content in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
