"""The tests of a programming problem, as stored with its prompt: JSON text in one of four kinds.

    asserts   a list of `assert f(1) == 2` statements; names that they do not define, and those in `entry_point`, are the candidate's (MBPP)
    check     a test program that defines `check(candidate)`; it is called with the function named `entry_point`, or calls itself: `check(Solution().f)`
              (HumanEval, LeetCode)
    calls     arguments and expected values of one function or method of `Solution`, tuples and lists being alike (LiveCodeBench, Deepcoder)
    stdin     inputs and expected outputs of a whole program (Codeforces)

`prelude` is code that runs before the candidate's, in its process: imports, or a prompt that defines helpers.
Every text starts with the same mark, which tells tests from any other gold answer.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Kind = Literal["asserts", "check", "calls", "stdin"]
_MARK = '{"code_tests": 1,'


@dataclass(frozen=True)
class CodeTests:
    """What decides whether a program is right; only the fields of its kind are filled."""

    kind: Kind
    prelude: str = ""
    asserts: tuple[str, ...] = ()
    test: str = ""
    entry_point: str = ""
    cases: tuple[tuple[Any, Any], ...] = ()  # calls: (list of arguments, value); stdin: (input, output)
    tolerance: float = 0.0  # stdin: absolute or relative, for numbers
    ignore_case: bool = False  # stdin

    def to_text(self) -> str:
        """Return the JSON text."""
        default = CodeTests(self.kind)
        content = {name: value for name, value in asdict(self).items() if value != getattr(default, name)}
        return json.dumps({"code_tests": 1, "kind": self.kind, **content})

    @staticmethod
    def from_text(text: str) -> "CodeTests":
        """Read the JSON text; raises ValueError where it is none."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop("code_tests", None) != 1:
            raise ValueError("not the text of tests")
        known = {field.name for field in fields(CodeTests)}
        if set(content) - known:
            raise ValueError(f"unknown fields {sorted(set(content) - known)}")
        content["asserts"] = tuple(content.get("asserts", ()))
        content["cases"] = tuple((given, expected) for given, expected in content.get("cases", ()))
        return CodeTests(**content)

    @property
    def count(self) -> int:
        """Number of tests, as far as they can be counted: a test program counts once."""
        return {"asserts": len(self.asserts), "check": 1}.get(self.kind, len(self.cases))


def is_tests(gold: str) -> bool:
    """Say whether a gold answer is the text of tests."""
    return gold.startswith(_MARK)
