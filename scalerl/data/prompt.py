"""The prompt: one schema for every source, so that nothing after preparation knows where a problem came from."""

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|quad|qquad|limits|big|Big|bigg|Bigg|mathrm|text|textbf|mathbf)(?![a-zA-Z])"
)
_SAME_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")


@dataclass(frozen=True)
class Prompt:
    """One problem with its checkable answer.

    `messages` are chat turns as (role, content) dictionaries; `difficulty` is "k/8" where the source has it; `split` is "train" or "holdout".
    `tests` is the JSON text of the tests of a programming problem (`scalerl.rewards.code_tests`), None for any other.
    """

    prompt_id: str
    task: str
    messages: tuple[dict[str, str], ...]
    answer: str
    difficulty: str | None
    source: str
    split: str
    tests: str | None = None

    @property
    def gold(self) -> str:
        """Return what a completion is judged against: the tests of a programming problem, else the answer."""
        return self.tests or self.answer

    @property
    def problem(self) -> str:
        """Return the text of the last user turn."""
        return next(turn["content"] for turn in reversed(self.messages) if turn["role"] == "user")

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values, ready for Parquet."""
        return asdict(self) | {"messages": [dict(turn) for turn in self.messages]}

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> "Prompt":
        """Build a prompt from a row; raises KeyError where a column is missing."""
        turns = tuple({"role": turn["role"], "content": turn["content"]} for turn in row["messages"])
        return Prompt(
            prompt_id=row["prompt_id"],
            task=row["task"],
            messages=turns,
            answer=row["answer"],
            difficulty=row["difficulty"],
            source=row["source"],
            split=row["split"],
            tests=row.get("tests"),  # data sets made before there were programming problems have no such column
        )


def make_prompt(
    problem: str,
    answer: str,
    *,
    source: str,
    task: str = "math",
    difficulty: str | None = None,
    tests: str | None = None,
) -> Prompt:
    """Return a prompt of one user turn, in the training split until the holdout is drawn."""
    text = canonical_text(problem)
    turns = ({"role": "user", "content": text},)
    return Prompt(prompt_id(text, task), task, turns, answer, difficulty, source, "train", tests)


def canonical_text(problem: str) -> str:
    r"""Return the problem as it is stored: Unicode NFC and Unix line ends, nothing else changed."""
    return unicodedata.normalize("NFC", problem.replace("\r\n", "\n"))


def prompt_id(problem: str, task: str) -> str:
    """Return 16 hex digits that name the problem: the SHA-256 of its canonical text and its task."""
    return hashlib.sha256(f"{task}\x1f{canonical_text(problem)}".encode()).hexdigest()[:16]


def matching_text(problem: str) -> str:
    r"""Return the form in which two copies of one problem are equal: letters and digits only, lower case, layout commands dropped.

    Two copies of a problem differ in blanks, dollar signs, `\dfrac` for `\frac`, `{x}^{2}` for `x^2`; none of that is left here.
    """
    plain = _SAME_FRACTION.sub(r"\\frac", _LAYOUT.sub("", unicodedata.normalize("NFKC", problem)))
    return "".join(character for character in plain.casefold() if character.isalnum())


def schema() -> "pa.Schema":
    """Return the Parquet schema of prompts."""
    import pyarrow as pa

    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    text = ("prompt_id", "task"), ("answer", "difficulty", "source", "split", "tests")
    fields = [(name, pa.string()) for name in text[0]] + [("messages", pa.list_(turn))]
    return pa.schema(fields + [(name, pa.string()) for name in text[1]])
