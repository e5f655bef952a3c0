r"""Readers of prompt files in the layouts in which these data sets are published: JSON lines, JSON lists, Parquet.

    {problem, answer, difficulty}                                                 polaris, deepscaler, math, jsonl (extra fields are ignored)
    {problem, solution: "... \boxed{7}"}                                          math, as first published: the answer is the solution's last box
    {question, answer: "... #### 18"}                                             gsm8k
    {prompt: [{role, content}], reward_model: {style, ground_truth}, extra_info}  verl, dapo; Polaris and AIME are packed so too
    {messages: [{role, content}], answer}                                         own files

Programming problems with their tests have layouts of their own: see `code.py`. Any source takes any of these files; `gsm8k` and `math` say where the answer stands.

A file is read in pieces: a piece is a few thousand rows as the file holds them, small to send to another process, and becomes rows there. A row that does not fit its
layout is an error that names file and line: a file with holes is mended, not half read.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from scalerl.data import code
from scalerl.rewards.answer import final_box
from warehouse.errors import UserError

# What verl-style files put around every problem. It instructs, it is not part of the problem; the recipe's system prompt instructs here.
_INSTRUCTIONS = (
    "Let's think step by step and output the final answer within \\boxed{}.",
    'Let\'s think step by step and output the final answer after "####".',
    "Please reason step by step, and put your final answer within \\boxed{}.",
    'Remember to put your answer on its own line after "Answer:".',
)
_OPENINGS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
)
_PROBLEM_NAMES = ("problem", "question", "prompt")
_KINDS = (".jsonl", ".json", ".parquet")
# Characters read at once from a JSON list.
_CHUNK = 1 << 20


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


@dataclass(frozen=True)
class Piece:
    """Some rows of a file, in order, not yet understood: their places in the file, and their contents as JSON texts or as an Arrow table."""

    places: tuple[int, ...]
    contents: Any


def read(path: Path, source: str) -> Iterator[Row]:
    """Yield the rows of a file (.jsonl, .json, either with .gz, or .parquet).

    `source` "gsm8k" takes the answer after "####", "math" from the solution's last box. Raises UserError for a missing file, an unknown kind of file, or a malformed row.
    """
    for piece in pieces(path, 1024):
        yield from rows(piece, path, source)


def pieces(path: Path, size: int) -> Iterator[Piece]:
    """Yield the file in pieces of at most `size` rows, read as they are asked for; the file is never in memory as a whole."""
    _existing(path)
    packed = path.suffix == ".gz"
    kind = Path(path.stem).suffix if packed else path.suffix
    if kind not in _KINDS or (packed and kind == ".parquet"):
        raise UserError(
            f"data: {path} is neither .jsonl nor .parquet nor .json (also with .gz); convert it to one of them"
        )
    if kind == ".parquet":
        yield from _parquet_pieces(path, size)
        return
    with path.open("rb") as raw:
        handle = io.TextIOWrapper(_unpacked(raw) if packed else raw, encoding="utf-8", newline="\n")
        found = _json_texts(handle, path) if kind == ".json" else _lines(handle)
        try:
            while part := list(islice(found, size)):
                yield Piece(tuple(place for place, _ in part), [content for _, content in part])
        except UnicodeDecodeError as error:
            raise UserError(f"data: {path} is not UTF-8 text ({error.reason}); convert it to UTF-8") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"data: {path} cannot be unpacked ({error}); is it whole?") from None


def rows(piece: Piece, path: Path, source: str) -> Iterator[Row]:
    """Yield the rows of a piece; raises UserError, naming file and line, for a malformed one. `path` is only named."""
    for place, content in _contents(piece, path, exact=source not in code.SOURCES):
        if source in code.SOURCES:
            row = code.problem(place, content, path, source)
            yield Row(row.line, row.text, row.solution or "decided by tests", row.difficulty, row.tests, row.unusable)
        else:
            yield _row(content, place, path, source)


def problems(path: Path) -> Iterator[str]:
    """Yield the problems of a benchmark file in any layout; answers are not looked at."""
    for piece in pieces(path, 1024):
        for number, content in _contents(piece, path):
            where = f"data: {path} line {number}"
            if not isinstance(content, Mapping):
                raise UserError(f"{where}: a row must be an object with a problem, not {type(content).__name__}")
            yield _problem(content, where)


def _contents(piece: Piece, path: Path, *, exact: bool = True) -> Iterator[tuple[int, Any]]:
    """Yield (line or row number from 1, content); `exact` keeps numbers as the characters that the file holds."""
    if not isinstance(piece.contents, list):
        yield from zip(piece.places, piece.contents.to_pylist(), strict=True)
        return
    # 1.50 and 12345678901234567890 lose nothing.
    number: Any = str if exact else None
    for place, text in zip(piece.places, piece.contents, strict=True):
        try:
            yield place, json.loads(text, parse_float=number, parse_int=number)
        except json.JSONDecodeError as error:
            raise UserError(f"data: {path} line {place} is not JSON ({error.msg}); mend or remove the line") from None


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


def _unpacked(raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw))


def _lines(handle: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text) of the lines that are not blank."""
    for number, line in enumerate(handle, 1):
        if line.strip():
            yield number, line


def _json_texts(handle: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, JSON text) of the elements of one JSON list, as it is read; many files of JSON lines are called .json too."""
    text = handle.read(_CHUNK).lstrip()
    if text.startswith("{"):
        yield from _lines(chain(text.splitlines(keepends=True)[:-1], _joined(text, handle)))
        return
    if not text.startswith("["):
        raise UserError(f"data: {path} must hold a list of problems")
    decoder, number, text = json.JSONDecoder(), 1, text[1:]
    while True:
        text = text.lstrip()
        if text.startswith("]"):
            return
        try:
            _, end = decoder.raw_decode(text)
            after = text[end:].lstrip()
            if not after:
                raise json.JSONDecodeError("the list does not end", text, end)
        except json.JSONDecodeError as error:
            # The element goes on in the part that is not read yet; parts grow with what is held, so that a long element is not tried too often.
            if more := handle.read(max(_CHUNK, len(text))):
                text += more
                continue
            raise UserError(f"data: {path} is not JSON at element {number} ({error.msg}); mend the file") from None
        if after[0] not in ",]":
            raise UserError(f"data: {path} is not JSON after element {number} (no comma); mend the file")
        yield number, text[:end]
        number, text = number + 1, after.removeprefix(",")


def _joined(text: str, handle: TextIO) -> Iterator[str]:
    """Yield the last line of a part together with its end, which is not read yet, and then the other lines."""
    last = text.splitlines(keepends=True)[-1]
    yield last if last.endswith("\n") else last + handle.readline()
    yield from handle


def _parquet_pieces(path: Path, size: int) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=size):
            yield Piece(tuple(range(number + 1, number + len(batch) + 1)), pa.Table.from_batches([batch]))
            number += len(batch)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"data: {path} is not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _row(content: Any, line: int, path: Path, source: str) -> Row:
    where = f"data: {path} line {line}"
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: a row must be an object with problem and answer, not {type(content).__name__}")
    problem = _problem(content, where)
    if source == "math" and "answer" not in content and isinstance(content.get("solution"), str):
        boxed = final_box(content["solution"]).content
        missing = "" if boxed else "answer: the solution ends in no box that is closed"
        return Row(line, problem, boxed or content["solution"], _eighths(content), unusable=missing)
    answer = answer_text(_answer(content, where))
    if answer is None:
        raise UserError(f"{where}: the answer must be text, a number or a list of them")
    if source == "gsm8k" and "answer" in content:
        answer = _after_hashes(answer, where)
    difficulty = content.get("difficulty")
    if source in ("math", "deepscaler", "dapo", "verl"):  # sets with scales of their own
        difficulty = _eighths(content)
    if difficulty is not None and not isinstance(difficulty, str):
        raise UserError(f'{where}: difficulty must be text such as "3/8", not {difficulty!r}')
    return Row(line, problem, answer, difficulty)


def _eighths(content: Mapping[str, Any]) -> str | None:
    difficulty = content.get("difficulty")
    return difficulty if isinstance(difficulty, str) and re.fullmatch("[0-8]/8", difficulty) else None


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
    for opening in _OPENINGS:
        if text.startswith(opening):
            text = text.removeprefix(opening).lstrip()
    for instruction in _INSTRUCTIONS:
        if text.rstrip().endswith(instruction):
            # One blank, or a blank line, joins problem and instruction; what the problem itself ends in stays.
            shortened = text.rstrip().removesuffix(instruction)
            return shortened.removesuffix("\n\n") if shortened.endswith("\n\n") else shortened.removesuffix(" ")
    return text


def _after_hashes(answer: str, where: str) -> str:
    _, mark, final = answer.rpartition("####")
    if not mark:
        raise UserError(
            f'{where}: a GSM8K answer ends in "#### N", this one does not; use data.source = "jsonl" for plain answers'
        )
    return final.strip().replace(",", "")
