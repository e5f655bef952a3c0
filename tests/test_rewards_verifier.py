"""The verifier on real answers: agreement with labelled data, known false verdicts, hanging and dying workers."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scalerl.recipe import Reward
from scalerl.rewards import equality
from scalerl.rewards.verifier import Judgement, Verifier

ROOT = Path(__file__).resolve().parents[1]
# Answers that no computer finishes: a tower of powers, the factorial of 10^10, an integral without a closed form.
HANGING = (r"\boxed{9^{9^{9^9}}}", r"\boxed{10000000000!}", r"\boxed{\prod_{k=1}^{1000000000} k}")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(Reward(deadline_s=0.5, workers=2)) as verifier:
        yield verifier


def judged(gold: str, text: str) -> bool:
    return equality.judge(gold, text).correct


@pytest.mark.parametrize(
    ("gold", "text", "correct"),
    [
        # Known false positives of verifiers in use: they must be wrong here.
        ("0", r"$x^2+y=$", False),
        (r"10^{-20}", r"\boxed{2\cdot10^{-20}}", False),
        ("0.00000001", "0.00000002", False),
        ("4", r"4\sqrt2", False),
        ("4", r"The answer is 4\sqrt{2}", False),
        ("4", r"\boxed{4\sqrt2}", False),
        ("3", r"\boxed{\frac{3}{", False),
        ("2", r"\boxed{\frac{2}{}}", False),
        ("5", r"\boxed{5} or rather \boxed{7", False),
        (r"2^{2002}", r"\boxed{4^{1001}+1}", False),
        (r"\frac{}{2}", r"\boxed{2}", False),
        # Known false negatives: they must be correct here.
        (r"\sqrt{1/n}", r"\boxed{1/\sqrt n}", True),
        (r"\frac{1}{\sqrt{n}}", r"\boxed{\sqrt{\frac{1}{n}}}", True),
        ("73", "**73**", True),
        ("73", "The answer is **73**.", True),
        ("10000", "10{,}000", True),
        ("10000", r"\boxed{10{,}000}", True),
        ("4989600", r"\boxed{4,\!989,\!600}", True),
        # ... without becoming lenient.
        (r"\sqrt{x^2}", r"\boxed{x}", False),
        ("x", r"\boxed{|x|}", False),
        ("x^2-1", r"\boxed{(x-1)(x+1)}", True),
        ("x^2-1", r"\boxed{(x-1)^2}", False),
        ("1/3", r"\boxed{0.333333}", True),
        ("1/3", r"\boxed{0.333}", False),
        ("1234567.0", r"\boxed{1234568}", False),
        (r"\pi", r"\boxed{3.14}", False),
        ("i", r"\boxed{-i}", False),
        ("(1,2)", r"\boxed{(2,1)}", False),
        ("1,2", r"\boxed{2,1}", True),
        ("32.5", r"\boxed{\frac{65}{2}}", True),
        ("5:9", r"\boxed{\frac59}", True),
        (r"\pm 2021", r"\boxed{2021}", False),
        ("12:00", r"\boxed{1:00}", False),
        ("x=1", r"\boxed{y=1}", False),
        ("12", r"\boxed{12\text{ cm}}", True),
        (r"25\%", r"\boxed{25}", True),
        ("0.25", r"\boxed{25\%}", True),
        ("e^e", r"\boxed{e^{e}}", True),
        ("0", "", False),
        ("0", r"\boxed{}", False),
        # Multiple choice, as Polaris writes it (the blank after the backslash is often lost).
        (r"\textbf{(B)}\;7", r"\boxed{7}", True),
        (r"\textbf{(B)}\;7", r"\boxed{(B)}", True),
        (r"\textbf{(B)}\;7", r"\boxed{\textbf{(B)}\ 7}", True),
        (r"\textbf{(B)}\;7", r"\boxed{C}", False),
        (r"\textbf{(D)}\20\sqrt{2}", r"\boxed{20\sqrt2}", True),
        (r"\textbf{(E)}\ ", r"\boxed{E}", True),
        ("7", r"\boxed{\textbf{(B)}\ 7}", True),
    ],
)
def test_known_false_verdicts_are_right(gold: str, text: str, correct: bool) -> None:
    assert judged(gold, text) is correct


def test_disagreements_of_the_two_checks_are_told() -> None:
    assert equality.judge(r"10^{-20}", r"\boxed{2\cdot10^{-20}}").disagreement == "math-verify correct, numeric wrong"
    assert equality.judge(r"\sqrt{1/n}", r"\boxed{1/\sqrt n}").disagreement == "math-verify wrong, numeric correct"
    assert equality.judge("x+1", r"\boxed{1+x}").disagreement == ""


# Pairs whose label we do not follow, with the reason. Index in the file: (our verdict, why).
PAIRS_JUDGED_OTHERWISE = {
    3: (False, "a comma between digits separates a list here (Polaris writes -1,0,1), so 1,22 is not 1.22"),
    16: (True, "a line break inside \\( \\) does not change the 9 in it"),
    86: (False, "the last box holds 255; a final answer in words after it does not count beside a box"),
    95: (
        False,
        "the gold's last box is 4; boxes are joined only where nothing but commas, 'and' or 'or' is between them",
    ),
    125: (False, "the gold's last box is 2; 'papers and' between two boxes keeps them apart"),
}


def test_labelled_pairs(shared_data: Path) -> None:
    pairs = json.loads((shared_data / "math_equivalence_pairs.json").read_text())
    labelled = {index: pair for index, pair in enumerate(pairs) if "expected" in pair}
    assert len(labelled) == 127
    verdicts = {index: judged(pair["gold"], pair["pred"]) for index, pair in labelled.items()}
    differing = {index: verdict for index, verdict in verdicts.items() if verdict != bool(labelled[index]["expected"])}
    assert differing == {index: verdict for index, (verdict, _) in PAIRS_JUDGED_OTHERWISE.items()}


def gsm8k_solutions(folder: Path) -> list[tuple[str, str, bool]]:
    """(gold, solution without calculator marks, graded correct) of the 1,319 x 4 recorded solutions."""
    found = []
    for line in (folder / "gsm8k_graded_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            text = re.sub(r"<<.*?>>", "", row[model]["solution"])
            found.append((gold, text, row[model]["is_correct"]))
    return found


def test_all_graded_gsm8k_solutions_agree(shared_data: Path, verifier: Verifier) -> None:
    solutions = gsm8k_solutions(shared_data)
    assert len(solutions) == 5276
    outcomes = verifier.judge([(gold, text) for gold, text, _ in solutions])
    wrong = [
        (gold, text[-60:], graded)
        for (gold, text, graded), outcome in zip(solutions, outcomes, strict=True)
        if outcome.outcome != ("correct" if graded else "wrong")
    ]
    assert wrong == []


def test_every_polaris_gold_can_be_compared_and_equals_itself(shared_data: Path, verifier: Verifier) -> None:
    golds = [json.loads(line)["answer"] for line in (shared_data / "polaris_4200.jsonl").read_text().splitlines()][::6]
    kinds = verifier.gold_kinds(golds)
    assert set(kinds) == {"expression", "text"}
    assert kinds.count("text") < 0.04 * len(golds)
    # A lone backslash before the closing brace would escape it; such golds (a lost blank) are boxed with the blank.
    texts = [f"Thus \\boxed{{{gold} }}" if gold.endswith("\\") else f"Thus \\boxed{{{gold}}}" for gold in golds]
    broken = {gold for gold in golds if gold.count("{") - gold.count("\\{") != gold.count("}") - gold.count("\\}")}
    pairs = [(gold, text) for gold, text in zip(golds, texts, strict=True) if gold not in broken]
    assert len(broken) <= 1
    assert [pair for pair, found in zip(pairs, verifier.judge(pairs), strict=True) if found.outcome != "correct"] == []


def test_a_hanging_answer_is_unverifiable_and_its_neighbours_are_judged(verifier: Verifier) -> None:
    pairs = [(str(index), f"\\boxed{{{index}}}") for index in range(60)]
    for place, text in zip((5, 30, 31), HANGING, strict=True):
        pairs[place] = ("7", text)
    outcomes = verifier.judge(pairs)
    assert [outcomes[place] for place in (5, 30, 31)] == [Judgement("unverifiable", "", "no verdict within 0.5 s")] * 3
    assert all(found.outcome == "correct" for place, found in enumerate(outcomes) if place not in (5, 30, 31))


def test_it_works_off_the_main_thread(verifier: Verifier) -> None:
    found: list[Judgement] = []
    thread = threading.Thread(target=lambda: found.extend(verifier.judge([("1/2", r"\boxed{0.5}"), ("2", HANGING[0])])))
    thread.start()
    thread.join(60)
    assert [judgement.outcome for judgement in found] == ["correct", "unverifiable"]
    assert verifier.deaths == 0  # one that we kill is none that died


def test_a_verifier_started_by_a_thread_outlives_it() -> None:
    with Verifier(Reward()) as own:
        thread = threading.Thread(target=lambda: own.judge([("1", "1")]))
        thread.start()
        thread.join(60)
        time.sleep(0.2)
        assert own.judge([("x+1", r"\boxed{1+x}")])[0].outcome == "correct"


def test_a_killed_worker_and_a_killed_zygote_are_replaced_and_no_answer_is_lost() -> None:
    before = set(psutil.Process().children())
    with Verifier(Reward(workers=1)) as own:
        assert own.judge([("1", "1")])[0].outcome == "correct"
        (zygote,) = set(psutil.Process().children()) - before
        zygote.children()[0].kill()
        assert [found.outcome for found in own.judge([("1", "1"), ("2", "2"), ("3", "4")])] == [
            "correct",
            "correct",
            "wrong",
        ]
        assert own.deaths == 1
        zygote.kill()
        zygote.wait(10)
        assert [found.outcome for found in own.judge([("4", "4"), ("5", "6")])] == ["correct", "wrong"]
        assert own.deaths == 2  # the workers of a zygote die with it


def test_closing_leaves_no_process_behind() -> None:
    before = set(psutil.Process().children(recursive=True))
    own = Verifier(Reward(workers=2))
    own.judge([("1", "1"), ("2", "2")])
    started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) >= 2
    own.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


def test_workers_end_when_the_parent_is_killed() -> None:
    code = f"""
    import os, psutil, threading, time
    from scalerl.recipe import Reward
    from scalerl.rewards.verifier import Verifier
    own = Verifier(Reward(workers=1, deadline_s=600))
    own.judge([("1", "1")])
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    own.judge([("1", r"{HANGING[0]}")])
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(1.0)  # the worker is now burning CPU
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_nothing_is_judged_twice_and_order_is_kept(verifier: Verifier) -> None:
    pairs = [("2", "2"), ("1", "1"), ("2", "3"), ("2", "2"), ("1", "1")]
    assert [found.outcome for found in verifier.judge(pairs)] == ["correct", "correct", "wrong", "correct", "correct"]
    assert verifier.judge([]) == []


@pytest.mark.slow
def test_it_works_inside_a_ray_actor(tmp_path: Path) -> None:
    code = f"""
    import ray
    from scalerl.recipe import Reward
    from scalerl.rewards.verifier import Verifier
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0, max_concurrency=2)
    class Judge:
        def judge(self):
            with Verifier(Reward(workers=1, deadline_s=0.5)) as own:
                return [found.outcome for found in own.judge([("1/2", r"\\boxed{{0.5}}"), ("2", r"{HANGING[0]}"), ("3", "4")])]

    print(ray.get(Judge.remote().judge.remote(), timeout=120))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip().splitlines()[-1:] == ["['correct', 'unverifiable', 'wrong']"], done.stderr[-2000:]


def test_an_answer_left_to_be_worked_out_counts_only_where_the_recipe_says_so() -> None:
    """A policy rewarded for `7 * 9` where 63 is asked learns to repeat the question."""
    left = [
        ("63", "7 * 9."),
        ("63", "Solve the following multiplication: 7 * 9."),
        ("-2", "3 - 5 ="),
        ("63", r"\boxed{7 \times 9}"),
        ("8", r"\boxed{\sqrt{64}}"),
        ("5", r"\boxed{10/2}"),
        ("63", r"\boxed{7\cdot9}"),
        ("63", r"\boxed{7\times9}"),
        ("5", r"\boxed{10\div2}"),
        ("2", r"\boxed{\frac63}"),
        ("3", r"\boxed{\sqrt9}"),
        ("7", r"\boxed{3\,+\,4}"),
    ]
    done = [
        ("63", "7 * 9 = 63"),
        ("63", "The answer is 63."),
        ("-2", "-2"),
        ("12", r"\boxed{12 \text{ m}^2}"),
        ("12", r"\boxed{12\,\mathrm{m}^3}"),
        ("45", r"\boxed{45^\circ}"),
        ("45", r"\boxed{45^{\circ}}"),
        ("63", r"\boxed{7 \cdot 9 = 63}"),
        ("0.5", r"\boxed{\frac12}"),
        ("0.5", r"\boxed{1/2}"),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}"),
    ]
    for rule, outcome in (("accept", "correct"), ("wrong", "wrong")):
        with Verifier(Reward(unevaluated=rule)) as verifier:
            assert [result.outcome for result in verifier.judge(left)] == [outcome] * len(left), rule
            assert [result.outcome for result in verifier.judge(done)] == ["correct"] * len(done), rule
