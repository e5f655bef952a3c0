"""The code reward: which program, which verdict, and that no program gets one that it has not earned."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.data import code as readers
from scalerl.recipe import Reward, load
from scalerl.rewards import sandbox as sandboxes
from scalerl.rewards.code import CodePool, extract_code
from scalerl.rewards.code_tests import CodeTests, is_tests
from scalerl.rewards.output import outputs_equal
from scalerl.rewards.plain import decode, encode
from scalerl.rewards.verifier import Verifier
from tests.sandbox_attacks import ATTACKS, PROGRAM_ATTACKS
from warehouse.errors import UserError

MECHANISMS = ("bubblewrap", "unshare", "landlock")
ADD = CodeTests("asserts", asserts=("assert add(1, 2) == 3", "assert add(-1, 1) == 0")).to_text()


def working(mechanism: str) -> bool:
    try:
        sandboxes.start(mechanism).close()
    except UserError:
        return False
    return True


@pytest.fixture(scope="module")
def pool() -> Iterator[CodePool]:
    try:
        sandboxes.start().close()
    except UserError as error:
        pytest.skip(str(error))
    made = CodePool(Reward(workers=2, code_wall_s=200, code_total_s=300))  # other work may starve a test machine
    yield made
    made.close()


# ---- which program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\nx = 1\n```\nbetter:\n```python3\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```\n```text\n3 4\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", None),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("x = 1", "x = 1"),
        ("```sh\nls\n```", None),
        ("```python\n\n```", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_closed_python_block_is_the_program(text: str | None, program: str | None) -> None:
    assert extract_code(text) == program


# ---- outputs and plain data


@pytest.mark.parametrize(
    ("expected", "found", "options", "equal"),
    [
        ("1 2\n3\n", "1 2 \n3\n\n", {}, True),
        ("1 2\n3", "1\n2\n3", {}, True),
        ("YES", "yes", {}, False),
        ("YES", "yes", {"ignore_case": True}, True),
        ("0.5", "0.5000001", {}, False),
        ("0.5", "0.5000001", {"tolerance": 1e-6}, True),
        ("1000000.0", "1000000.9", {"tolerance": 1e-6}, True),
        ("0.5", "nan", {"tolerance": 1e-6}, False),
        ("1", "1e999", {"tolerance": 1e-6}, False),
        ("1", "", {}, False),
        ("1", "1 1", {}, False),
    ],
)
def test_outputs_are_compared_word_by_word(expected: str, found: str, options: dict[str, float], equal: bool) -> None:
    assert outputs_equal(expected, found, **options) is equal  # type: ignore[arg-type]


def test_plain_data_arrives_as_it_was_and_subclasses_as_their_base() -> None:
    value = {"a": [1, -2.5, True, None, (b"x", 1j)], (1, 2): {3}, "big": 10**400, "f": frozenset({"é"})}
    assert decode(encode(value)) == value

    class Yes(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert type(decode(encode(Yes(3)))) is int
    for hostile in (
        b'{"a": 1}',
        b'["os.system", "x"]',
        b'["handle", 1]',
        b'["int", [1]]',
        b"[",
        b'["dict", [[["list", []], 1]]]',
    ):
        with pytest.raises((ValueError, TypeError)):
            decode(hostile)


# ---- verdicts


def test_each_kind_of_test_tells_right_from_wrong(pool: CodePool) -> None:
    check = CodeTests(
        "check", test="def check(c):\n    assert c(2) == 4\n    assert abs(c(.5) - 1) < 1e-9", entry_point="f"
    )
    method = CodeTests("check", test="def check(c):\n    assert c(n=3) == [3]\ncheck(Solution().wrap)")
    calls = CodeTests("calls", entry_point="wrap", cases=(([1], [1]), ([2], [2])))
    stdin = CodeTests("stdin", cases=(("1 2\n", "3"), ("5 6\n", "11")))
    cases = [
        (ADD, "add = lambda a, b: a + b", "add = lambda a, b: a - b"),
        (check.to_text(), "def f(x): return 2 * x", "def f(x): return x ** 2"),
        (
            method.to_text(),
            "class Solution:\n    def wrap(self, n): return [n]",
            "class Solution:\n    def wrap(self, n): return n",
        ),
        (calls.to_text(), "class Solution:\n    def wrap(self, n): return (n,)", "def wrap(n): return [1]"),
        (stdin.to_text(), "print(sum(map(int, input().split())))", "print(3)"),
    ]
    jobs = [(tests, program) for tests, right, wrong in cases for program in (right, wrong)]
    assert [found.outcome for found in pool.run(jobs)] == ["correct", "wrong"] * len(cases)


def test_objects_may_be_listed_and_used_but_not_compared(pool: CodePool) -> None:
    listed = CodeTests("asserts", asserts=("assert list(f(3)) == [0, 1, 2]", "assert set(f(2)) == {0, 1}")).to_text()
    compared = CodeTests("asserts", asserts=("assert f(3) == f(3)",)).to_text()
    caught = CodeTests("asserts", asserts=("try:\n    assert f(3) == 1\nexcept Exception:\n    pass",)).to_text()
    generator = "def f(n):\n    yield from range(n)"
    found = [
        judgement.outcome for judgement in pool.run([(listed, generator), (compared, generator), (caught, generator)])
    ]
    assert found == ["correct", "wrong", "wrong"]


def test_expected_exceptions_can_be_expected(pool: CodePool) -> None:
    tests = CodeTests(
        "asserts", asserts=("try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass",)
    ).to_text()
    assert [found.outcome for found in pool.run([(tests, "f = lambda x: 1 / x"), (tests, "f = lambda x: x")])] == [
        "correct",
        "wrong",
    ]


@pytest.mark.parametrize(
    "test",
    [
        "assert all(map(lambda x: f(x) == x + 1, [1, 2]))",
        "assert not list(filter(lambda x: f(x) != x + 1, [1, 2]))",
        "for a, b in zip([1, 2], map(f, [1, 2])):\n    assert a + 1 == b",
        "assert max(map(f, [1]), default=2) == 2",
    ],
)
def test_a_program_cannot_end_the_iteration_of_a_test(pool: CodePool, test: str) -> None:
    tests = CodeTests("asserts", asserts=(test,)).to_text()
    named = "class StopIteration(Exception): pass\ndef f(x): raise StopIteration"
    programs = ["def f(x): return x + 1", "def f(x): raise StopIteration", named]
    assert [found.outcome for found in pool.run([(tests, one) for one in programs])] == ["correct", "wrong", "wrong"]


def test_a_short_answer_cannot_grow_in_the_checker(pool: CodePool) -> None:
    tests = CodeTests("asserts", asserts=("assert int(f(1)) == 2",)).to_text()
    program = "from decimal import Decimal\ndef f(x): return Decimal('1e99999999')"
    assert pool.run([(tests, program)])[0].outcome == "wrong"
    for hostile in (b'["Fraction", "1e99999999"]', b'["Decimal", "1e99999999"]', b'["Fraction", "1.5"]'):
        with pytest.raises(ValueError):
            decode(hostile)


def test_the_verifier_sends_programs_to_the_sandbox_and_numbers_to_the_mathematics() -> None:
    with Verifier(Reward(verifier="integer", workers=2), inside_think=True) as verifier:
        assert verifier.gold_kinds([ADD, "3", "x"]) == ["tests", "expression", "unreadable"]
        answers = [
            (ADD, "add</think>```python\ndef add(a, b): return a + b\n```"),
            ("3", "1+2</think>3"),
            (ADD, "no end"),
            (ADD, "</think>add them"),
        ]
        assert [found.outcome for found in verifier.judge(answers)] == ["correct", "correct", "wrong", "wrong"]
        assert len(verifier.protections()) >= 3


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes.kernel, "IS_LINUX", False)
    with pytest.raises(UserError, match="no sandbox works here"):
        CodePool(Reward()).run([(ADD, "add = max")])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("reward.code_wall_s=1", "reward.code_wall_s is below reward.code_cpu_s"),
        ("reward.code_total_s=2", "reward.code_total_s is below reward.code_wall_s"),
        ("reward.sandbox=docker", "reward.sandbox"),
    ],
)
def test_contradictory_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load("base", [setting])


# ---- files


def test_layouts_of_code_data_become_tests() -> None:
    stdin = readers.parse_tests('{"inputs": ["1\\n"], "outputs": ["2\\n"]}')
    assert stdin == CodeTests("stdin", cases=(("1\n", "2\n"),))
    assert readers.parse_tests({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}).cases == (([1, 2], 3),)
    listed = [{"input": '[1, 2]\n"a"', "output": "[1]", "testtype": "functional", "metadata": {"func_name": "f"}}]
    found = readers.parse_tests(listed)
    assert (found.entry_point, found.cases) == ("f", (([[1, 2], "a"], [1]),))
    for text in ("[]", "{", '[{"input": 1}]', '[{"input": "1", "output": "1", "type": "magic"}]'):
        with pytest.raises(ValueError, match="tests"):
            readers.parse_tests(text)
    assert is_tests(found.to_text()) and CodeTests.from_text(found.to_text()).kind == "calls"


def test_a_problem_with_several_answers_is_returned_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "problems.json"
    path.write_text(
        '[{"problem": "If there are multiple answers, print any of them.", "tests": [{"input": "1", "output": "1"}]}]'
    )
    (row,) = (readers.problem(line, row, path, "codeforces") for line, row in readers.rows(path))
    assert row.tests is None and row.unusable.startswith("several answers")
    path.write_text('[{"problem": "x"}]')
    with pytest.raises(UserError, match=r"line 1: not a row of source codeforces.*tests"):
        [readers.problem(line, row, path, "codeforces") for line, row in readers.rows(path)]


# ---- attacks


def _attack(mechanism: str, folder: Path, names: list[str] | None = None) -> dict[str, str]:
    """Run the attacks against a host with secrets in it; returns what each has won, nothing else than its name."""
    secret = str(secrets.randbelow(10**12) + 10**12)
    place = Path("/var/tmp") / f"answers-{secret[:4]}-{os.getpid()}"
    place.write_text(f"SECRET={secret}")
    place.chmod(0o644)
    canary = Path("/var/tmp") / f"canary-{os.getpid()}-{mechanism}"
    victim = subprocess.Popen(["sleep", "600"], env={"SECRET": secret})
    wins: dict[str, str] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        values = {
            "@FILE@": place,
            "@CANARY@": canary,
            "@PARENT@": victim.pid,
            "@VICTIM@": victim.pid,
            "@PORT@": server.getsockname()[1],
        }
        pool = CodePool(
            Reward(sandbox=mechanism, workers=3, code_cpu_s=1, code_wall_s=2.5, code_total_s=5, code_memory_mb=512)
        )
        try:
            functions = CodeTests("asserts", asserts=(f"assert f() == {secret}",)).to_text()
            program = CodeTests("stdin", cases=(("7\n", secret),)).to_text()
            attacks = [(name, functions, text) for name, text in ATTACKS.items()]
            attacks += [(f"program: {name}", program, text) for name, text in PROGRAM_ATTACKS.items()]
            jobs = []
            for name, tests, text in attacks:
                if names is None or name in names:
                    for mark, value in values.items():
                        text = text.replace(mark, str(value))
                    jobs.append((name, tests, text))
            found = pool.run([(tests, text) for _, tests, text in jobs])
            wins |= {
                name: "correct"
                for (name, _, _), judgement in zip(jobs, found, strict=True)
                if judgement.outcome == "correct"
            }
            honest = pool.run([(functions, f"f = lambda: {secret}"), (program, f"print({secret})")])
            assert [judgement.outcome for judgement in honest] == ["correct", "correct"], honest
            _look_for_marks(wins, canary, victim, server)
        finally:
            pool.close()
            victim.kill()
            victim.wait()
            place.unlink()
    return wins


def _look_for_marks(wins: dict[str, str], canary: Path, victim: subprocess.Popen[bytes], server: socket.socket) -> None:
    if canary.exists():
        canary.unlink()
        wins["a file on the host"] = str(canary)
    if victim.poll() is not None:
        wins["a process of the host"] = "killed"
    try:
        server.accept()
        wins["the network"] = "reached"
    except TimeoutError:
        pass


def _descendants() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_attack_wins_and_nothing_is_left_behind(mechanism: str, tmp_path: Path) -> None:
    if not working(mechanism):
        pytest.skip(f"{mechanism} does not work on this host")
    before = _descendants()
    assert len(ATTACKS) + len(PROGRAM_ATTACKS) >= 30
    assert _attack(mechanism, tmp_path) == {}
    deadline = time.monotonic() + 5
    while _descendants() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _descendants() - before == set()


def test_quick_attacks_win_nothing(pool: CodePool, tmp_path: Path) -> None:
    mechanism = sandboxes.start()
    name = mechanism.options.mechanism
    mechanism.close()
    quick = [
        "object equal to everything", "int equal to everything", "exit 0 in the call", "frame inspection", "forged answers on the channel",
        "patched encoder in the frames above", "reading the file of answers", "environment", "network to the host", "killing the parent",
        "writing a file on the host", "program: reading the file of answers",
    ]  # fmt: skip
    assert _attack(name, tmp_path, quick) == {}


def test_the_suite_sees_an_attack_that_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without protection the file of answers can be read: the same attack on the same path must then win."""
    monkeypatch.setattr(sandboxes, "start", lambda *_, **__: sandboxes.Sandbox(sandboxes.Options("none")))
    won = _attack("auto", tmp_path, ["reading the file of answers", "object equal to everything"])
    assert won == {"reading the file of answers": "correct"}


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_attack_wins_as_an_ordinary_user(mechanism: str, tmp_path: Path) -> None:
    """The same suite in a process that is no root, with an interpreter that such a user can read."""
    if os.geteuid() != 0:
        pytest.skip("this already is an ordinary user")
    python = os.environ.get("SCALERL_PLAIN_PYTHON", "")
    if not python or not shutil.which("setpriv"):
        pytest.skip("name a Python that every user can read in SCALERL_PLAIN_PYTHON")
    program = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), *sys.path[1:]]!r}\n"
        "from pathlib import Path\nfrom tests.test_rewards_code import _attack, working\n"
        f"print(_attack({mechanism!r}, Path('/tmp')) if working({mechanism!r}) else 'unavailable')"
    )
    command = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", python, "-B", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    if done.stdout.strip() == "unavailable":
        pytest.skip(f"{mechanism} does not work for an ordinary user here")
    assert (done.stdout.strip(), done.returncode) == ("{}", 0), done.stderr[-2000:]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_packages_that_lie_in_tmp_are_seen(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment below /tmp: the temporary folder of a job must not hide it. The program writes a file, too, where the mechanism gives it a folder."""
    if not working(mechanism):
        pytest.skip(f"{mechanism} does not work on this host")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        packages = Path(place) / "site-packages"
        packages.mkdir()
        (packages / "little_package_in_tmp.py").write_text("VALUE = 41\n")
        monkeypatch.syspath_prepend(str(packages))
        program = "import little_package_in_tmp as p, os, tempfile\ndef add(a, b):\n    n = p.VALUE - 40\n"
        if mechanism != "landlock":
            program += "    with tempfile.TemporaryFile() as f: f.write(b'x'); n = n * f.tell()\n"
        pool = CodePool(Reward(workers=1, sandbox=mechanism, code_wall_s=200, code_total_s=300))  # type: ignore[arg-type]
        try:
            (found,) = pool.run([(ADD, program + "    return a + b * n\n")])
        finally:
            pool.close()
    assert (found.outcome, found.note) == ("correct", "")


# ---- corpora


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source"),
    [("humaneval.jsonl.gz", "humaneval"), ("mbpp_sanitized.json", "mbpp"), ("leetcode_functional.json", "leetcode")],
)
def test_reference_solutions_pass_and_broken_ones_do_not(
    shared_data: Path, pool: CodePool, name: str, source: str
) -> None:
    rows = [readers.problem(line, row, shared_data / name, source) for line, row in readers.rows(shared_data / name)]
    assert all(row.tests for row in rows)
    found = pool.run([(row.tests or "", row.solution) for row in rows])
    assert {
        row.line: judgement.note for row, judgement in zip(rows, found, strict=True) if judgement.outcome != "correct"
    } == {}
    # Every function gives back what no test expects: whatever it gave, in a list with a string.
    broken = [
        (row.tests or "", row.solution.replace("return ", "return 'broken', "))
        for row in rows
        if "return " in row.solution
    ]
    won = [judgement for judgement in pool.run(broken) if judgement.outcome == "correct"]
    assert len(won) <= 0.02 * len(broken), won


@pytest.mark.slow
def test_programs_that_print_the_stored_output_pass_and_others_do_not(shared_data: Path, pool: CodePool) -> None:
    """The file has no reference solutions: a table of the stored outputs stands for one."""
    path = shared_data / "codeforces_stdin.json"
    read = (readers.problem(line, row, path, "codeforces") for line, row in readers.rows(path))
    rows = [row for row in read if row.tests]
    assert len(rows) == 327  # of 408; the others are interactive or have several right answers
    right, wrong = [], []
    for row in rows:
        table = dict(CodeTests.from_text(row.tests or "").cases)
        right.append((row.tests or "", f"import sys\nprint({table!r}[sys.stdin.read()])"))
        wrong.append((row.tests or "", f"import sys\nprint({table!r}[sys.stdin.read()], 0)"))
    assert {judgement.outcome for judgement in pool.run(right)} == {"correct"}
    assert {judgement.outcome for judgement in pool.run(wrong)} == {"wrong"}


def test_prepare_takes_programming_problems_and_keeps_what_it_rejects(tmp_path: Path) -> None:
    import json

    import pyarrow.parquet as pq

    from scalerl.data.prepare import load_prompts, prepare

    names = ["add", "double", "halve", "negate"]
    rows = [
        {"prompt": f"Write a function to {name} a number that comes with the letter {name[0]}.", "code": f"def {name}(x): return x", "test_imports": [], "test_list": [f"assert {name}(0) == 0"]}
        for name in names
    ]  # fmt: skip
    rows.append(
        {"prompt": "Write a function that nobody can test.", "code": "", "test_imports": [], "test_list": ["assert ("]}
    )
    path = tmp_path / "mbpp.json"
    path.write_text(json.dumps(rows))
    recipe = load("base", ["data.source=mbpp", f"data.path={path}", "data.holdout=1"])
    record = prepare(recipe, tmp_path / "set", warehouse_root=tmp_path / "warehouse")
    assert (record.train_rows, record.holdout_rows, record.rejected_reasons) == (3, 1, {"tests": 1})
    prompts = load_prompts(tmp_path / "set", "train") + load_prompts(tmp_path / "set", "holdout")
    assert all(is_tests(prompt.gold) and prompt.task == "code" for prompt in prompts)
    (rejected,) = pq.read_table(tmp_path / "set" / "rejected.parquet").to_pylist()
    assert (rejected["line"], rejected["reason"][:27]) == (5, "tests: a test is no Python ")
