"""Downstream benchmarks: the files people report on, the unbiased estimator, what is truncated, and rows that are never the holdout's."""

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl import home
from scalerl.data import arithmetic
from scalerl.data.prepare import prepare
from scalerl.evaluation import benchmarks, downstream
from scalerl.evaluation.checkpoint import Checkpoint, evaluate_checkpoint, of_folder
from scalerl.evaluation.pass_at_k import estimates, pass_at_k
from scalerl.recipe import Benchmark, Recipe, Reward, Rollout, load, parse
from scalerl.rewards.verifier import Verifier
from scalerl.rollout.trace import Trace, TraceRequest
from scalerl.steps import dataset_id
from tests.rollout_models import character_tokenizer, successor_model
from warehouse.errors import UserError
from warehouse.query import rows


@settings(deadline=None)
@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    draws = list(itertools.combinations([index < correct for index in range(samples)], k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_against_the_papers_listing_at_large_numbers() -> None:
    def listing(n: int, c: int, k: int) -> float:  # Figure 3 of Chen et al. 2021
        return 1.0 if n - c < k else float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))

    for n, c, k in [(200, 3, 100), (200, 199, 1), (16, 1, 8), (1024, 5, 512)]:
        assert pass_at_k(n, c, k) == pytest.approx(listing(n, c, k), rel=1e-12)
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(4, 1, 5)


def test_errors_are_over_prompts_not_over_samples() -> None:
    # Two prompts always right, two never: the samples of a prompt say nothing new, so the error is that of four draws, 0.5774 / 2.
    found = estimates([16, 16, 0, 0], 16)
    assert list(found) == [1, 2, 4, 8, 16]
    for value, error in found.values():
        assert value == 0.5
        assert error == pytest.approx(math.sqrt((4 * 0.25) / 3 / 4))
    assert estimates([8], 16)[1] == (0.5, 0.0)


def entry(**knobs: Any) -> Benchmark:
    return parse({"evaluation": {"benchmarks": [knobs]}}, "test").evaluation.benchmarks[0]


class Characters:
    """A tokenizer that spells every character: nothing of a prompt is lost."""

    eos_token = pad_token = unk_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return type("Encoding", (), {"input_ids": [ord(character) for character in text]})

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(Reward()) as shared:
        yield shared


PLAIN = Rollout(prompt_template="plain", think_in_prompt=False, interruption="none")


@pytest.mark.parametrize(
    ("name", "file", "count", "skipped", "words"),
    [
        ("aime24", "aime24.parquet", 30, 0, "within \\boxed{}"),
        ("aime25", "aime25.parquet", 30, 0, "within \\boxed{}"),
        ("math500", "math500.jsonl", 500, 0, "within \\boxed{}"),
        ("gsm8k", "gsm8k_test.jsonl", 1319, 0, "within \\boxed{}"),
        ("humaneval", "humaneval.jsonl.gz", 164, 0, "```python"),
        ("mbpp", "mbpp_sanitized.json", 427, 0, "```python"),
    ],
)
def test_published_files_are_read_whole(
    shared_data: Path, name: str, file: str, count: int, skipped: int, words: str
) -> None:
    asked = benchmarks.load(entry(name=name, path=str(shared_data / file)), Characters(), PLAIN, 0)
    assert (len(asked.prompts), sum(asked.skipped.values())) == (count, skipped)
    assert len({prompt.prompt_id for prompt in asked.prompts}) == count
    assert all(words in prompt.problem for prompt in asked.prompts)
    assert asked.label.startswith(f"{name}@k16-t1-n{count}-s0-")
    assert asked.longest == max(len(prompt.problem) for prompt in asked.prompts)


def test_right_answers_of_the_files_are_judged_right(shared_data: Path, verifier: Verifier) -> None:
    """The benchmark's own solutions, answered as a model would, through the verifier and the sandbox."""
    answers: list[tuple[str, str, str]] = []
    for name, file in [("gsm8k", "gsm8k_test.jsonl"), ("math500", "math500.jsonl"), ("aime25", "aime25.parquet")]:
        asked = benchmarks.load(entry(name=name, path=str(shared_data / file), limit=5), Characters(), PLAIN, 0)
        answers += [(name, p.gold, f"So the answer is \\boxed{{{p.answer}}}.") for p in asked.prompts]
        answers += [(name, p.gold, "So the answer is \\boxed{-17.25}.") for p in asked.prompts]
    for name, file in [("humaneval", "humaneval.jsonl.gz"), ("mbpp", "mbpp_sanitized.json")]:
        asked = benchmarks.load(entry(name=name, path=str(shared_data / file), limit=2), Characters(), PLAIN, 0)
        answers += [(name, p.gold, f"Here:\n```python\n{p.answer}\n```") for p in asked.prompts]
        answers += [(name, p.gold, "```python\ndef nothing(): pass\n```") for p in asked.prompts]
    outcomes = [judgement.outcome for judgement in verifier.judge([(gold, text) for _, gold, text in answers])]
    expected = ["correct"] * 5 + ["wrong"] * 5
    assert outcomes == expected * 3 + ["correct", "correct", "wrong", "wrong"] * 2


def test_a_livecodebench_row_with_functional_tests(tmp_path: Path, verifier: Verifier) -> None:
    row = {
        "question_content": "Return the sum of two numbers.",
        "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
        "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        "private_test_cases": json.dumps([{"input": "5\n-7", "output": "-2", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "add"}),
    }
    (tmp_path / "lcb.jsonl").write_text(json.dumps(row) + "\n")
    asked = benchmarks.load(entry(name="livecodebench", path=str(tmp_path / "lcb.jsonl")), Characters(), PLAIN, 0)
    assert "def add" in asked.prompts[0].problem
    right = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    judged = verifier.judge([(asked.prompts[0].gold, right), (asked.prompts[0].gold, right.replace("a + b", "3"))])
    assert [judgement.outcome for judgement in judged] == ["correct", "wrong"]


def test_few_shot_prefix_letter_by_letter(tmp_path: Path) -> None:
    """The form of lm-evaluation-harness: question, blank, solution, an empty line."""
    (tmp_path / "shots.jsonl").write_text(
        '{"question": "1+1?", "answer": "Two.\\n#### 2"}\n{"question": "2+2?", "answer": "Four.\\n#### 4"}\n'
    )
    (tmp_path / "b.jsonl").write_text('{"question": "3+3?", "answer": "#### 6"}\n')
    knobs: dict[str, Any] = {
        "name": "gsm8k",
        "path": str(tmp_path / "b.jsonl"),
        "few_shot": 2,
        "few_shot_path": str(tmp_path / "shots.jsonl"),
    }
    asked = benchmarks.load(entry(template="Question: {problem}\nAnswer:", **knobs), Characters(), PLAIN, 0)
    assert asked.prompts[0].problem == (
        "Question: 1+1?\nAnswer: Two.\n#### 2\n\nQuestion: 2+2?\nAnswer: Four.\n#### 4\n\nQuestion: 3+3?\nAnswer:"
    )
    assert asked.prompts[0].answer == "6"
    with pytest.raises(UserError, match="few_shot = 3, but"):
        benchmarks.load(entry(**knobs | {"few_shot": 3}), Characters(), PLAIN, 0)


def answer_of(verifier: Verifier, text: str, finish: str = "ended", **knobs: Any) -> benchmarks.Answer:
    """Judge one answer to "2+2=", spelled in characters."""
    prompt = benchmarks.make_prompt("2+2=", "4", source="b")
    own = entry(name="b", path="x", format="jsonl", samples=1, **knobs)
    questions = benchmarks.Questions(own, "b@x", "math", (prompt,), ((1,),), PLAIN, 0, {})
    request = TraceRequest(0, prompt.prompt_id, 0, (1,), 0, -1, 8)
    tokens = [ord(character) for character in text]
    flat = np.zeros(len(tokens))
    trace = Trace(request, np.array(tokens), flat, flat, flat, finish)  # type: ignore[arg-type]
    return benchmarks.judged(questions, [trace], Characters(), verifier)[0]


def test_budget_and_stop_texts(verifier: Verifier) -> None:
    assert answer_of(verifier, "The answer is 4").correct
    late = answer_of(verifier, "The answer is 4", max_tokens=14)
    assert (late.text, late.trace.finish, late.correct) == ("The answer is ", "truncated", False)
    # Cut off in mid-answer although right so far: wrong, and counted as truncated.
    full = answer_of(verifier, "It is \\boxed{4}. And", finish="truncated")
    assert (full.judgement.outcome, full.trace.finish, full.correct) == ("correct", "truncated", False)
    # A stop text means that the answer had ended in time.
    stopped = answer_of(verifier, "It is \\boxed{4}\n\nQuestion: 7+7= 14", finish="truncated", stop=["Question:"])
    assert (stopped.text, stopped.trace.finish, stopped.correct) == ("It is \\boxed{4}\n\n", "ended", True)


def test_when_a_benchmark_is_due() -> None:
    every_two = entry(name="b", path="x", format="jsonl", every=2)
    steps = [0, 5, 10, 15, 20, 25]  # before training and at the ends of five stages
    assert [s for s in steps if benchmarks.due(every_two, s, 0, 5, 25)] == [0, 10, 20, 25]


def test_recipes_say_what_is_wrong_with_a_benchmark() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": "holdout", "path": "x", "format": "jsonl"}, "stands for the held-out prompts"),
        ({"name": "mine", "path": "x"}, "its name is no format"),
        ({"name": "gsm8k", "path": "x", "template": "Q"}, "needs {problem}"),
        ({"name": "gsm8k", "path": "x", "few_shot": 2}, "belong together"),
        ({"name": "gsm8k", "path": "x", "sampels": 2}, "did you mean evaluation.benchmarks.0.samples"),
    ]
    for knobs, words in wrong:
        with pytest.raises(UserError, match=words.replace("{", r"\{")):
            entry(**knobs)
    with pytest.raises(UserError, match="integer cannot judge"):
        parse(
            {"reward": {"verifier": "integer"}, "data": {"source": "arithmetic"}}
            | {"evaluation": {"benchmarks": [{"name": "gsm8k", "path": "x"}]}},
            "test",
        )
    with pytest.raises(UserError, match=r"benchmark gsm8k: no file .*nowhere.jsonl"):
        benchmarks.require_files([entry(name="gsm8k", path="nowhere.jsonl")])


def test_benchmarks_are_no_part_of_a_runs_identity() -> None:
    plain = load("scalerl", ["data.path=x.jsonl"])
    content = plain.model_dump(mode="json")
    content["evaluation"]["benchmarks"] = [{"name": "gsm8k", "path": "x"}]
    assert parse(content, "scalerl").run_id == plain.run_id


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A checkpoint that answers every sum with 7: after "=" comes <think></think>7 and the end."""
    vocabulary = {token: index for index, token in enumerate(arithmetic.VOCABULARY)}
    seven = arithmetic.encode("7")[0]
    model = successor_model(
        {token: seven for token in range(len(vocabulary))} | {seven: arithmetic.EOS}, len(vocabulary), arithmetic.EOS
    )
    folder = tmp_path / "echo"
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def endless(folder: Path) -> None:
    """Let the checkpoint say 7 for ever."""
    seven = arithmetic.encode("7")[0]
    model = successor_model({token: seven for token in range(22)}, len(arithmetic.VOCABULARY), arithmetic.EOS)
    model.save_pretrained(folder)


def sums(path: Path, *pairs: tuple[str, str]) -> Path:
    path.write_text("".join(json.dumps({"problem": problem, "answer": answer}) + "\n" for problem, answer in pairs))
    return path


def quick() -> Recipe:
    return load("tiny", ["rollout.slots=8"])


def test_a_checkpoint_is_asked_and_its_rows_are_never_the_holdouts(
    scalerl_home: Path, echo: Path, tmp_path: Path
) -> None:
    file = sums(tmp_path / "sums.jsonl", ("3+4=", "7"), ("2+2=", "4"), ("5+2=", "7"), ("3+4=", "7"))
    named = (f"seven={file}", f"again={file}")
    knobs = ("format=jsonl", "think=none", "max_tokens=4")
    given = {"samples": 4, "temperature": 0.0, "limit": None}
    checkpoint = of_folder(echo, quick(), {})
    entries = benchmarks.entries_of(named, quick(), given, knobs)
    told: list[tuple[int, int]] = []
    records = downstream.ask(checkpoint, entries, lambda done, total: told.append((done, total)))
    assert [record["name"] for record in records] == ["seven", "again"]
    first = records[0]
    # Three of four prompts, one of them twice in the file, are answered by 7; greedy, so all samples agree.
    assert (first["pass_rate"], first["prompts"], first["samples"], first["truncated_share"]) == (0.75, 4, 4, 0)
    assert first["pass_at_k"] == {"1": 0.75, "2": 0.75, "4": 0.75}
    assert first["stderr"] == pytest.approx(0.25)
    assert told[-1] == (32, 32)
    root = home.warehouse_root()
    stored = rows(root, "select * from evaluations order by benchmark")
    assert {row["benchmark"] for row in stored} == {record["benchmark"] for record in records}
    assert all("@" in row["benchmark"] for row in stored)
    assert rows(root, "select * from curve") == []
    curve = rows(root, "select * from benchmark_curve where benchmark = 'seven'")
    assert [(row["pass_rate"], row["samples"], row["settings"]) for row in curve] == [
        (0.75, 4, first["benchmark"].partition("@")[2])
    ]
    at_k = rows(root, "select k, pass_at_k, stderr from pass_at_k where benchmark = ? order by k", [first["benchmark"]])
    assert [row["k"] for row in at_k] == [1, 2, 4]
    assert [row["pass_at_k"] for row in at_k] == pytest.approx([0.75] * 3)
    lines = gzip.decompress(
        (downstream.record_path(checkpoint, first["benchmark"]).parent / first["answers"]).read_bytes()
    )
    kept = [json.loads(line) for line in lines.decode().splitlines()]
    assert len(kept) == 16
    assert {line["text"] for line in kept} == {"7"}
    # Asked again, nothing is asked.
    assert downstream.ask(checkpoint, entries) == records
    assert len(rows(root, "select * from evaluations")) == 2


def test_an_answer_that_never_ends_is_wrong_and_truncated(scalerl_home: Path, echo: Path, tmp_path: Path) -> None:
    endless(echo)
    file = sums(tmp_path / "sums.jsonl", ("3+4=", "7777"))
    given = {"samples": 2, "temperature": 0.0, "limit": None}
    entries = benchmarks.entries_of([f"b={file}"], quick(), given, ["format=jsonl", "think=none", "max_tokens=4"])
    record = downstream.ask(of_folder(echo, quick(), {}), entries)[0]
    assert (record["pass_rate"], record["truncated_share"]) == (0, 1)


@pytest.mark.parametrize(
    ("knobs", "tokens"),
    [
        (["think=none"], 28 + 8),  # the recipe's: thinking and answer together
        (["think=none", "max_tokens=4"], 4),
        (["think=none", "max_tokens=60"], 60),  # the benchmark's own, also where it is larger
        (["max_tokens=5"], 5),
    ],
)
def test_an_endless_answer_has_its_budget_whatever_room_its_prompt_leaves(
    scalerl_home: Path, echo: Path, tmp_path: Path, knobs: list[str], tokens: int
) -> None:
    endless(echo)
    file = sums(tmp_path / "sums.jsonl", ("3+4=", "7"), ("33+44+55+66=", "7"))
    given = {"samples": 2, "temperature": 0.0, "limit": None}
    entries = benchmarks.entries_of([f"b={file}"], quick(), given, ["format=jsonl", *knobs])
    checkpoint = of_folder(echo, quick(), {})
    record = downstream.ask(checkpoint, entries)[0]
    assert (record["tokens_mean"], record["truncated_share"]) == (tokens, 1)
    kept = gzip.decompress(
        (downstream.record_path(checkpoint, record["benchmark"]).parent / record["answers"]).read_bytes()
    )
    assert {json.loads(line)["tokens"] for line in kept.splitlines()} == {tokens}


def holdout_of(folder: Path, *overrides: str, **asked: Any) -> Checkpoint:
    recipe = load("tiny", ["rollout.slots=8", "data.holdout=3", "data.train=10", *overrides])
    dataset = dataset_id(recipe)
    prepare(recipe, home.dataset_folder(dataset))
    return of_folder(folder, recipe, {"samples": 2, **asked}, dataset)


def test_no_question_is_answered_by_the_record_of_another(scalerl_home: Path, echo: Path) -> None:
    """A model that says 7 for ever: without interruption its answers have think_hi + answer_tokens tokens, so every length tells which question was asked."""
    endless(echo)
    lengths = {}
    for think, answer in ((6, 2), (6, 5), (9, 2), (6, 2)):
        budget = (f"rollout.think_lo={think}", f"rollout.think_hi={think}", f"rollout.answer_tokens={answer}")
        record = evaluate_checkpoint(holdout_of(echo, *budget, "rollout.interruption=none"))
        assert record["tasks"][0]["tokens_mean"] == think + answer
        lengths[record["benchmark"]] = think + answer
    assert sorted(lengths.values()) == [8, 11, 11]  # the first and the last are one question
    stored = rows(home.warehouse_root(), "select benchmark, tokens_mean from evaluations")
    assert {row["benchmark"]: row["tokens_mean"] for row in stored} == lengths and len(stored) == 3


@pytest.mark.parametrize(
    ("override", "other"),
    [
        ("rollout.engine=vllm", True),
        ("rollout.phrase='no more</think>'", True),
        ("rollout.interruption=none", True),
        ("rollout.stop=['+']", True),
        ("model.body_dtype=bfloat16", True),
        ("reward.verifier=math-verify", True),
        ("reward.unevaluated=wrong", True),
        ("data.max_prompt_tokens=30", True),
        ("data.holdout=4", True),
        ("rollout.slots=4", False),
        ("rollout.temperature=0.5", False),
        ("reward.workers=2", False),
        ("optimizer.lr=1e-3", False),
        ("training.steps=720", False),
        ("execution.trace_sample=1", False),
    ],
)
def test_what_changes_the_answers_is_in_the_name_of_an_evaluation(
    scalerl_home: Path, echo: Path, override: str, other: bool
) -> None:
    def asked(*overrides: str) -> Checkpoint:
        recipe = load("tiny", ["training.mode=asynchronous", *overrides])
        return of_folder(echo, recipe, {}, dataset_id(recipe))

    assert (asked(override).benchmark != asked().benchmark) == other
    assert (asked(override).record != asked().record) == other


def test_a_benchmark_that_another_judge_reads_is_asked_again(scalerl_home: Path, echo: Path, tmp_path: Path) -> None:
    file = sums(tmp_path / "sums.jsonl", ("3+4=", "7"))
    given = {"samples": 2, "temperature": 0.0, "limit": None}
    entries = benchmarks.entries_of([f"b={file}"], quick(), given, ["format=jsonl", "think=none", "max_tokens=4"])
    strict = load("tiny", ["rollout.slots=8", "reward.unevaluated=wrong"])
    names = [downstream.ask(of_folder(echo, recipe, {}), entries)[0]["benchmark"] for recipe in (quick(), strict)]
    names.append(downstream.ask(of_folder(echo, quick(), {}), entries)[0]["benchmark"])
    assert names[0] == names[2] != names[1]
    assert len(rows(home.warehouse_root(), "select * from evaluations")) == 2


def test_a_tokenizer_that_cannot_write_the_problem_is_named(scalerl_home: Path, echo: Path, tmp_path: Path) -> None:
    file = sums(tmp_path / "words.jsonl", ("What is two plus two?", "4"))
    entries = benchmarks.entries_of([f"b={file}"], quick(), {}, ["format=jsonl"])
    with pytest.raises(UserError, match="this model's tokenizer cannot write the problem 'What is two plus two"):
        downstream.ask(of_folder(echo, quick(), {}), entries)
    assert not (scalerl_home / "warehouse").exists()


def test_names_without_a_file_come_from_the_runs_recipe() -> None:
    content = load("scalerl", ["data.path=x"]).model_dump(mode="json")
    content["evaluation"]["benchmarks"] = [{"name": "gsm8k", "path": "there.jsonl", "samples": 3}]
    recipe = parse(content, "scalerl")
    found = benchmarks.entries_of(["gsm8k", "aime24=a.parquet"], recipe, {"samples": None, "limit": 5}, ["think=none"])
    assert [(b.path, b.samples, b.limit, b.think) for b in found] == [
        ("there.jsonl", 3, 5, "none"),
        ("a.parquet", 16, 5, "none"),
    ]
    with pytest.raises(UserError, match="write NAME=FILE"):
        benchmarks.entries_of(["aime25"], recipe, {}, [])


def test_the_report_shows_benchmarks_apart_from_the_holdout(scalerl_home: Path, echo: Path, tmp_path: Path) -> None:
    from scalerl.report.page import write_report
    from warehouse.writer import append

    file = sums(tmp_path / "sums.jsonl", ("3+4=", "7"), ("2+2=", "4"))
    checkpoint = of_folder(echo, quick(), {})
    given = {"samples": 2, "temperature": 0.0, "limit": None}
    entries = benchmarks.entries_of([f"seven={file}"], quick(), given, ["format=jsonl", "think=none", "max_tokens=4"])
    downstream.ask(checkpoint, entries)
    root, run_id = home.warehouse_root(), checkpoint.run_id
    append(
        root, "runs", run_id, [{"recipe_name": "r", "recipe": "{}", "source": "scalerl", "compute_unit": "gpu-hours"}]
    )
    page = write_report(root, run_id, tmp_path / "report.html").read_text()
    part = page.partition('id="benchmarks"')[2].partition("</section>")[0]
    assert "<strong>seven</strong>" in part
    assert "0.500 (k = 2)" in part
    assert 'id="benchmarks"' in page
    assert "seven" not in page.partition('id="evaluations"')[2].partition("</section>")[0]
