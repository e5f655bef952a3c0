"""Readers of programming problems with their tests, in the layouts in which these data sets are published.

    humaneval    {prompt, entry_point, test: "def check(candidate): ...", canonical_solution}                    JSON lines, also gzipped
    mbpp         {prompt (or text), test_list, test_imports (or test_setup_code), code}                          sanitized: a JSON list
    leetcode     {problem, tests: {functional: "def check(candidate): ... check(Solution().f)"}, solutions}
    codeforces   {problem, tests: [{input, output}]}
    deepcoder    {problem (or a verl prompt), tests (or reward_model.ground_truth)}; LiveCodeBench's {question_content, public_test_cases, private_test_cases}

A row that does not fit its layout is an error that names file and line. A row that fits but cannot be judged (several right answers, an interactive problem, tests
that cannot be read) is returned with the reason, to be rejected and kept with it.
"""

import ast
import base64
import binascii
import builtins
import gzip
import io
import json
import pickle
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.rewards.code_tests import CodeTests
from warehouse.errors import UserError

SOURCES = ("humaneval", "mbpp", "leetcode", "codeforces", "deepcoder")
# What LeetCode imports for everybody.
LEETCODE_PRELUDE = """from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import *
from string import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, typing
from math import inf
"""
_INSTRUCTION = "Write the program in Python, in one fenced ```python block."
_SEVERAL = re.compile(
    r"any of them|(?:print|output|find|return|choose|pick) any\b|any (?:valid|correct|suitable|such|possible) (?:\w+ )?(?:answer|solution|one|output|of)|"
    r"(?:multiple|several|many) (?:\w+ ){0,2}(?:answers|solutions|ways|possible|valid|suitable|such|correct|optimal)|more than one (?:\w+ )?(?:answer|solution)|you (?:may|can) (?:print|output) them in any order",
    re.IGNORECASE,
)
_INTERACTIVE = re.compile(r"interactive problem|interactor|flush (?:the )?(?:output|standard)|fflush", re.IGNORECASE)
_ANY_CASE = re.compile(r"in any case|any case \(|case[- ]insensitive|any register", re.IGNORECASE)
_TOLERANCE = re.compile(
    r"(?:absolute or relative|relative or absolute|absolute|relative) error\D{0,80}10\^\{?\s*-\s*(\d+)", re.IGNORECASE
)
_LARGEST_PACKED = 256 << 20


@dataclass(frozen=True)
class Problem:
    """One row as read: its place in the file (from 1), the problem, the reference solution ("" where there is none), its tests as text.

    `unusable` is the reason why it cannot be judged, with `tests` None then; else "".
    """

    line: int
    text: str
    solution: str
    tests: str | None
    difficulty: str | None = None
    unusable: str = ""


def problem(line: int, row: Any, path: Path, source: str) -> Problem:
    """Return a row of a file of this source as a problem; raises UserError, naming file and line, for a row of another layout."""
    reader = {
        "humaneval": _humaneval,
        "mbpp": _mbpp,
        "leetcode": _leetcode,
        "codeforces": _codeforces,
        "deepcoder": _deepcoder,
    }[source]
    where = f"data: {path} line {line}"
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row must be an object, not {type(row).__name__}")
    try:
        return reader(line, row)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{where}: not a row of source {source} ({type(error).__name__}: {error}); it has {', '.join(map(str, row)) or 'nothing'}"
        ) from None


def rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line or row number from 1, content)."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield from enumerate(pq.read_table(path).to_pylist(), 1)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"data: {path} is not a readable Parquet file ({str(error).splitlines()[0]})") from None
        return
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"data: {path} cannot be read ({error}); is it whole, and UTF-8?") from None
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind == ".json":
        content = _json(text, f"data: {path}")
        if not isinstance(content, list):
            raise UserError(f"data: {path} must hold a list of problems, not {type(content).__name__}")
        yield from enumerate(content, 1)
    elif kind == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, _json(line, f"data: {path} line {number}")
    else:
        raise UserError(
            f"data: {path} is neither .json, .jsonl (also with .gz) nor .parquet; convert it to one of them"
        )


def parse_tests(value: Any, *, starter: str = "") -> CodeTests:
    """Read tests in the layouts of Deepcoder, LiveCodeBench, TACO and verl; raises ValueError with the reason where they cannot be judged.

    Known are {inputs, outputs, fn_name}, and lists of {input, output, testtype or type, fn_name or metadata.func_name}, as JSON text or as values.
    """
    value = _json_or_reason(value) if isinstance(value, str) else value
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        name = value.get("fn_name") or ""
        given, expected = list(value["inputs"]), list(value["outputs"])
        if len(given) != len(expected):
            raise ValueError("tests: more inputs than outputs, or fewer")
        if not name:
            return CodeTests("stdin", cases=tuple((_lines(i), _lines(o)) for i, o in zip(given, expected, strict=True)))
        if all(isinstance(item, list) and len(item) == 1 for item in expected):
            expected = [item[0] for item in expected]
        arguments = [item if isinstance(item, list) else [item] for item in given]
        return CodeTests(
            "calls",
            prelude=LEETCODE_PRELUDE,
            entry_point=name,
            cases=tuple(zip(arguments, expected, strict=True)),
        )
    if isinstance(value, Mapping) and isinstance(value.get("functional"), str):
        return CodeTests("check", prelude=LEETCODE_PRELUDE, test=value["functional"])
    if not isinstance(value, list) or not value or not all(isinstance(test, Mapping) for test in value):
        raise ValueError("tests: none, or in no layout that is known")
    return _listed_tests(value, starter)


def _listed_tests(tests: list[Mapping[str, Any]], starter: str) -> CodeTests:
    kinds = {str(test.get("testtype") or test.get("type") or "stdin") for test in tests}
    if not all("input" in test and "output" in test for test in tests):
        raise ValueError("tests: a test without input or output")
    if kinds <= {"stdin", "stdin_stdout"}:
        return CodeTests("stdin", cases=tuple((_lines(test["input"]), _lines(test["output"])) for test in tests))
    if not kinds <= {"functional", "function_call"}:
        raise ValueError(f"tests: of the kinds {', '.join(sorted(kinds))}")
    name = next((found for test in tests if (found := _function_name(test))), "") or _defined(starter)
    if not name:
        raise ValueError("tests: the function to call is not named")
    cases = tuple((_arguments(test["input"]), _value(test["output"])) for test in tests)
    return CodeTests("calls", prelude=LEETCODE_PRELUDE, entry_point=name, cases=cases)


def _humaneval(line: int, row: Mapping[str, Any]) -> Problem:
    prompt, test, name = row["prompt"], row["test"], row["entry_point"]
    tests = CodeTests("check", prelude=prompt, test=test, entry_point=name)
    text = f"Complete this Python function.\n\n```python\n{prompt.strip()}\n```\n\n{_INSTRUCTION}"
    solution = prompt + row.get("canonical_solution", "")
    problem = _syntax(prompt, "the prompt") or _syntax(test, "the test")
    return _problem(line, text, solution, tests, problem)


def _mbpp(line: int, row: Mapping[str, Any]) -> Problem:
    asserts = tuple(row["test_list"])
    own: list[str] = []
    setup = "\n".join(row["test_imports"]) if "test_imports" in row else row.get("test_setup_code", "")
    problem = next((found for text in (setup, *asserts) if (found := _syntax(text, "a test"))), "")
    if not problem:
        # Some functions are called like one of Python's own; some tests use modules that their solution imports.
        own = [name for name in re.findall(r"^def (\w+)", row.get("code", ""), re.MULTILINE) if hasattr(builtins, name)]
        modules = [name for name in _free("\n".join(asserts)) if name in sys.stdlib_module_names]
        setup = "\n".join([setup, *(f"import {name}" for name in modules)]).strip()
    call = "" if problem else _first_call("\n".join(asserts), own)
    told = f"\n\nThe tests call it like this: `{call}`" if call else ""
    text = f"{row.get('prompt') or row['text']}{told}\n\n{_INSTRUCTION}"
    return _problem(
        line,
        text,
        row.get("code", ""),
        CodeTests("asserts", prelude=setup, asserts=asserts, entry_point=" ".join(own)),
        problem,
    )


def _leetcode(line: int, row: Mapping[str, Any]) -> Problem:
    test = row["tests"]["functional"]
    tests = CodeTests("check", prelude=LEETCODE_PRELUDE, test=test)
    return _problem(line, row["problem"], row.get("solutions", ""), tests, _syntax(test, "the test"))


def _codeforces(line: int, row: Mapping[str, Any]) -> Problem:
    cases = tuple((test["input"], test["output"]) for test in row["tests"])
    text = row["problem"]
    return _problem(
        line, f"{text.strip()}\n\n{_INSTRUCTION}", row.get("solution", ""), _contest(text, cases), _unjudgeable(text)
    )


def _deepcoder(line: int, row: Mapping[str, Any]) -> Problem:
    text = row.get("problem") or row.get("question_content") or row.get("question") or _user_turn(row["prompt"])
    starter = row.get("starter_code") or ""
    try:
        value = row["tests"] if "tests" in row else _livecodebench(row) if "public_test_cases" in row else None
        if value is None:
            value = row["reward_model"]["ground_truth"]
        tests = parse_tests(value, starter=starter)
    except ValueError as error:
        return Problem(line, text, "", None, unusable=str(error))
    problem = ""
    if tests.kind == "stdin":
        tests, problem = _contest(text, tests.cases), _unjudgeable(text)
    elif tests.kind == "check":
        problem = _syntax(tests.test, "the test")
    shown = f"{text}\n\n```python\n{starter}\n```" if starter and starter not in text else text
    solutions = row.get("solutions")
    solution = solutions[0] if isinstance(solutions, list) and solutions else solutions if solutions else ""
    difficulty = row.get("difficulty")
    eighths = difficulty if isinstance(difficulty, str) and re.fullmatch("[0-8]/8", difficulty) else None
    return _problem(line, shown, str(solution), tests, problem, eighths)


def _problem(
    line: int, text: str, solution: str, tests: CodeTests, problem: str, difficulty: str | None = None
) -> Problem:
    if not problem and not tests.count:
        problem = "tests: none"
    return Problem(line, text, solution, None if problem else tests.to_text(), difficulty, problem)


def _contest(text: str, cases: tuple[tuple[Any, Any], ...]) -> CodeTests:
    """Return stdin tests with the comparison that the problem's own checker makes, as far as its text says."""
    granted = _TOLERANCE.search(text)
    tolerance = 10.0 ** -int(granted[1]) if granted else 0.0
    return CodeTests("stdin", cases=cases, tolerance=tolerance, ignore_case=bool(_ANY_CASE.search(text)))


def _unjudgeable(text: str) -> str:
    if _INTERACTIVE.search(text):
        return "interactive: it talks with its judge"
    return "several answers: one of them is stored, another would be called wrong" if _SEVERAL.search(text) else ""


def _livecodebench(row: Mapping[str, Any]) -> list[Any]:
    """Return public and private tests; the private ones are JSON text, or that text pickled, compressed and in base64."""
    public = _json_or_reason(row["public_test_cases"])
    private = row.get("private_test_cases") or "[]"
    if private.lstrip().startswith("["):
        return [*public, *_json_or_reason(private)]
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(private, validate=True), _LARGEST_PACKED)
        text = _TextUnpickler(io.BytesIO(content)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ValueError(f"tests: private tests cannot be read ({type(error).__name__})") from None
    return [*public, *_json_or_reason(text)]


class _TextUnpickler(pickle.Unpickler):
    """Reads pickled text and nothing else: a pickle that names a class or function is refused before anything is called."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse every name."""
        raise pickle.UnpicklingError(f"names {module_name}.{global_name}")


def _user_turn(turns: Any) -> str:
    if isinstance(turns, str):
        return turns
    return str(next(turn["content"] for turn in reversed(turns) if turn["role"] == "user"))


def _function_name(test: Mapping[str, Any]) -> str:
    metadata = test.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    return str(test.get("fn_name") or metadata.get("func_name") or "")


def _defined(starter: str) -> str:
    found = re.findall(r"def\s+(\w+)\s*\(", starter)
    return next((name for name in found if not name.startswith("__")), "")


def _arguments(given: Any) -> list[Any]:
    """Return the arguments: a list as it is, text as one JSON value a line."""
    if isinstance(given, str):
        return [_value(line) for line in given.split("\n") if line.strip()]
    return list(given) if isinstance(given, list) else [given]


def _value(text: Any) -> Any:
    return _json_or_reason(text) if isinstance(text, str) else text


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _free(text: str) -> list[str]:
    from scalerl.rewards.checker import free_names

    return free_names(text, {})


def _first_call(text: str, named: list[str]) -> str:
    """Return the first call of a function that is the candidate's: one whose name the tests do not know, or one of those named."""
    own = {*_free(text), *named}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
            return ast.unparse(node)
    return ""


def _syntax(text: str, what: str) -> str:
    try:
        compile(text, "<tests>", "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError) as error:
        return f"tests: {what} is no Python ({error})"
    return ""


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}); mend or remove it") from None


def _json_or_reason(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"tests: not JSON ({error})") from None
