"""Readers of prompt files: JSON lines and Parquet, in the layouts in which these data sets are published.

    {problem, answer, difficulty}                                                 Polaris-53K, MATH (extra fields are ignored)
    {question, answer: "... #### 18"}                                             GSM8K
    {prompt: [{role, content}], reward_model: {style, ground_truth}, extra_info}  verl, as Polaris and AIME are packed
    {messages: [{role, content}], answer}                                         own files

Programming problems with their tests have layouts of their own: see `code.py`.

A row that does not fit its layout is an error that names file and line: a file with holes is mended, not half read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from scalerl.data import code
from warehouse.errors import UserError

# The sentence that verl-style files append to every problem. It instructs, it is not part of the problem; the recipe's system prompt instructs here.
_INSTRUCTIONS = (
    "Let's think step by step and output the final answer within \\boxed{}.",
    'Let\'s think step by step and output the final answer after "####".',
    "Please reason step by step, and put your final answer within \\boxed{}.",
)
_PROBLEM_NAMES = ("problem", "question", "prompt")


@dataclass(frozen=True)
class Row:
    """One row as read: its place in the file (from 1), the problem, the answer as text, and the difficulty where there is one.

    Programming problems have the text of their tests, and the reference solution as answer; `unusable` says why a row cannot be judged.
    """

    line: int
    problem: str
    answer: str
    difficulty: str | None
    tests: str | None = None
    unusable: str = ""


def read(path: Path, source: str) -> Iterator[Row]:
    """Yield the rows of a JSONL or Parquet file.

    `source` "gsm8k" takes the answer after "####". Raises UserError for a missing file, an unknown kind of file, or a malformed row.
    """
    if source in code.SOURCES:
        for row in code.read(_existing(path), source):
            yield Row(row.line, row.text, row.solution or "decided by tests", row.difficulty, row.tests, row.unusable)
        return
    for number, content in _contents(path):
        yield _row(content, number, path, source)


def problems(path: Path) -> Iterator[str]:
    """Yield the problems of a benchmark file in any layout; answers are not looked at."""
    for number, content in _contents(path):
        where = f"data: {path} line {number}"
        if not isinstance(content, Mapping):
            raise UserError(f"{where}: a row must be an object with a problem, not {type(content).__name__}")
        yield _problem(content, where)


def _contents(path: Path) -> Iterator[tuple[int, Any]]:
    """Return (line or row number from 1, content) pairs of a file, by its suffix."""
    _existing(path)
    reader = {".jsonl": _json_lines, ".parquet": _parquet_rows}.get(path.suffix)
    if reader is None:
        raise UserError(f"data: {path} is neither .jsonl nor .parquet; convert it to one of the two")
    return reader(path)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"data: no file {path}; name the prompt file with data.path (or --path)")
    return path


def answer_text(value: Any) -> str | None:
    """Return an answer as text, exactly once: numbers without a float's tail, a list joined by commas, None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int | Decimal):
        return str(value)
    if isinstance(value, list | tuple):
        parts = [answer_text(part) for part in value]
        return None if None in parts or not parts else ", ".join(part for part in parts if part is not None)
    return None


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as handle:
        for number, line in enumerate(_decoded(handle, path), 1):
            if not line.strip():
                continue
            try:
                # Numbers stay the characters that the file holds: 1.50 and 12345678901234567890 lose nothing.
                yield number, json.loads(line, parse_float=str, parse_int=str)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"data: {path} line {number} is not JSON ({error.msg}); mend or remove the line"
                ) from None


def _decoded(handle: Iterator[str], path: Path) -> Iterator[str]:
    try:
        yield from handle
    except UnicodeDecodeError as error:
        raise UserError(f"data: {path} is not UTF-8 text ({error.reason}); convert it to UTF-8") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for content in batch.to_pylist():
                number += 1
                yield number, content
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"data: {path} is not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _row(content: Any, line: int, path: Path, source: str) -> Row:
    where = f"data: {path} line {line}"
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: a row must be an object with problem and answer, not {type(content).__name__}")
    problem = _problem(content, where)
    answer = answer_text(_answer(content, where))
    if answer is None:
        raise UserError(f"{where}: the answer must be text, a number or a list of them")
    if source == "gsm8k" and "answer" in content:
        answer = _after_hashes(answer, where)
    difficulty = content.get("difficulty")
    if difficulty is not None and not isinstance(difficulty, str):
        raise UserError(f'{where}: difficulty must be text such as "3/8", not {difficulty!r}')
    return Row(line, problem, answer, difficulty)


def _problem(content: Mapping[str, Any], where: str) -> str:
    turns = content.get("messages") or content.get("prompt")
    if isinstance(turns, list):
        if not all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in turns):
            raise UserError(f"{where}: every chat turn needs role and content")
        users = [turn["content"] for turn in turns if turn["role"] == "user"]
        if len(users) != 1 or not isinstance(users[0], str):
            raise UserError(f"{where}: a prompt needs exactly one user turn, here are {len(users)}")
        return _without_instruction(users[0])
    for name in _PROBLEM_NAMES:
        if isinstance(content.get(name), str):
            return _without_instruction(content[name])
    raise UserError(
        f"{where}: no text in problem, question, prompt or messages; the row has {', '.join(map(str, content)) or 'nothing'}"
    )


def _answer(content: Mapping[str, Any], where: str) -> Any:
    reward = content.get("reward_model")
    if isinstance(reward, Mapping) and "ground_truth" in reward:
        return reward["ground_truth"]
    if "answer" not in content:
        raise UserError(
            f"{where}: no answer (nor reward_model.ground_truth); the row has {', '.join(map(str, content))}"
        )
    return content["answer"]


def _without_instruction(text: str) -> str:
    for instruction in _INSTRUCTIONS:
        if text.rstrip().endswith(instruction):
            # One blank joins problem and instruction; what the problem itself ends in stays.
            return text.rstrip().removesuffix(instruction).removesuffix(" ")
    return text


def _after_hashes(answer: str, where: str) -> str:
    _, mark, final = answer.rpartition("####")
    if not mark:
        raise UserError(
            f'{where}: a GSM8K answer ends in "#### N", this one does not; use data.source = "jsonl" for plain answers'
        )
    return final.strip().replace(",", "")
