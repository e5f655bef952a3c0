"""Preparation: what is read, what is rejected and why, and that training and holdout never share a problem."""

import hashlib
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl import recipe as recipes
from scalerl.data import overlap, sources
from scalerl.data.prepare import DatasetRecord, dataset_key, load_prompts, prepare
from scalerl.data.prompt import make_prompt, matching_text, prompt_id
from warehouse import query
from warehouse.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(number: int) -> str:
    """A problem that shares neither words nor letters in a row with any other one."""
    noise = hashlib.sha256(str(number).encode()).hexdigest()
    return " ".join(noise[start : start + 4] for start in range(0, 60, 4)) + "?"


def recipe_for(path: Path, *sets: str, seed: int = 0) -> recipes.Recipe:
    knobs = (f'data.path="{path}"', "data.source=jsonl", "data.holdout=4", *sets)
    return recipes.load("scalerl", knobs, seed)


# ---------------------------------------------------------------------------------------------------- prompts and rows


def test_a_prompt_is_named_by_its_task_and_canonical_text() -> None:
    expected = hashlib.sha256(b"math\x1fWhat is 1+1?\nSay it.").hexdigest()[:16]
    assert prompt_id("What is 1+1?\r\nSay it.", "math") == expected
    assert prompt_id("What is 1+1?\nSay it.", "code") != expected
    assert make_prompt("Caf\u0065\u0301", "1", source="x").problem == "Caf\u00e9"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Find  $x$.", r"find \(x\)"),
        (r"\frac{1}{2}", r"\dfrac12"),
        (r"$\left( a_{1} \right)$", "(a_1)"),
        (r"$\text{HEX}$", "hex"),
    ],
)
def test_matching_text_sees_through_typesetting(left: str, right: str) -> None:
    assert matching_text(left) == matching_text(right)


def test_matching_text_keeps_what_makes_a_problem() -> None:
    assert matching_text("x + 1 = 2") != matching_text("x + 1 = 3")
    assert matching_text(r"\leftarrow x") != matching_text("x")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("  12 ", "12"),
        (5, "5"),
        (5.0, "5"),
        (0.1, "0.1"),
        (Decimal("1.50"), "1.50"),
        (["34"], "34"),
        ([3, 4.5, "x"], "3, 4.5, x"),
        (True, None),
        (None, None),
        ([], None),
        ([None], None),
        ({"a": 1}, None),
    ],
)
def test_answers_become_text_once(value: Any, text: str | None) -> None:
    assert sources.answer_text(value) == text


def test_numbers_in_a_file_keep_their_digits(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"problem": "a", "answer": 1.50}\n\n{"problem": "b", "answer": 12345678901234567890}\n{"problem": "c", "answer": [1, 2.0]}\n'
    )
    assert [(row.line, row.answer) for row in sources.read(path, "jsonl")] == [
        (1, "1.50"),
        (3, "12345678901234567890"),
        (4, "1, 2.0"),
    ]


def test_gsm8k_answers_stand_after_the_hashes(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "g.jsonl", [{"question": "q", "answer": "so <<1+1=2>>2\n#### 1,234"}])
    assert [(row.problem, row.answer) for row in sources.read(path, "gsm8k")] == [("q", "1234")]


def test_chat_rows(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = write_lines(tmp_path / "c.jsonl", [{"messages": turns, "answer": 1, "difficulty": "3/8"}])
    assert list(sources.read(path, "jsonl")) == [sources.Row(1, "q", "1", "3/8")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"problem"', "line 2 is not JSON"),
        ("[1]", "line 2: a row must be an object"),
        ('{"answer": 1}', "line 2: no text in problem, question, prompt or messages; the row has answer"),
        ('{"problem": "a"}', "line 2: no answer"),
        ('{"problem": "a", "answer": null}', "line 2: the answer must be text, a number or a list"),
        ('{"problem": "a", "answer": 1, "difficulty": [1]}', "line 2: difficulty must be text"),
        ('{"messages": [{"role": "user"}], "answer": 1}', "line 2: every chat turn needs role and content"),
        (
            '{"messages": [{"role": "system", "content": "s"}], "answer": 1}',
            "line 2: a prompt needs exactly one user turn",
        ),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "a", "answer": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=complaint) as raised:
        list(sources.read(path, "jsonl"))
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "x.csv").write_text("a,b\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "\xe9", "answer": 1}\n')
    for name, complaint in (
        ("x.parquet", "not a readable Parquet file"),
        ("x.csv", "neither .jsonl nor .parquet"),
        ("latin.jsonl", "not UTF-8"),
        ("none.jsonl", "no file"),
    ):
        with pytest.raises(UserError, match=complaint):
            list(sources.read(tmp_path / name, "jsonl"))


def verl_rows(rows: list[dict[str, str]]) -> pa.Table:
    """Rows of {problem, answer} as published in Parquet: chat turns with an instruction, the answer in reward_model."""
    instruction = " Let's think step by step and output the final answer within \\boxed{}."
    return pa.Table.from_pylist(
        [
            {
                "data_source": "polaris",
                "prompt": [{"content": row["problem"] + instruction, "role": "user"}],
                "ability": "math",
                "reward_model": {"ground_truth": row["answer"], "style": "rule"},
                "extra_info": {"index": index, "split": "train"},
            }
            for index, row in enumerate(rows)
        ]
    )


def test_both_published_layouts_give_the_same_prompts(shared_data: Path, tmp_path: Path) -> None:
    original = shared_data / "polaris_4200.jsonl"
    rows = [json.loads(line) for line in original.read_text().splitlines()]
    pq.write_table(verl_rows(rows), tmp_path / "polaris.parquet")
    from_json = [(row.problem, row.answer) for row in sources.read(original, "polaris")]
    from_parquet = [(row.problem, row.answer) for row in sources.read(tmp_path / "polaris.parquet", "polaris")]
    assert len(from_json) == 4200
    assert from_parquet == from_json


# ---------------------------------------------------------------------------------------------------- overlap


def test_a_shared_run_of_thirteen_words_is_a_suspect_and_twelve_are_not() -> None:
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
    ]
    benchmark = [f"Prove that {' '.join(words)} holds."]
    thirteen = f"Show: {' '.join(words)}, of course"
    twelve = f"Show: {' '.join(words[:12])}, of course"
    assert overlap.contaminated([thirteen, twelve], benchmark) == (set(), {0})


def test_a_copy_in_other_typesetting_is_found() -> None:
    benchmark = [r"Compute $\dfrac{1}{2} + x$."]
    assert overlap.contaminated([r"compute \(\frac12+x\)", "Compute 1"], benchmark) == ({0}, set())


def test_phrases_of_the_genre_are_no_suspects() -> None:
    phrase = "can be written as m over n where m and n are relatively prime positive integers find m plus n"
    problems = [f"{problem(number)} {phrase}" for number in range(6)]
    assert overlap.contaminated(problems, [f"{problem(99)} {phrase}"]) == (set(), set())


def test_near_copies_against_brute_force() -> None:
    texts = [problem(number) for number in range(30)]
    texts += [texts[3] + " Give a reason.", texts[4].upper(), texts[5][:-20] + "other ending", texts[3][5:]]
    runs = [{t[i : i + 12] for i in range(len(t) - 11)} for t in map(matching_text, texts)]
    clusters = overlap.near_copies(texts)
    for a in range(len(texts)):
        for b in range(a):
            alike = len(runs[a] & runs[b]) >= 0.65 * min(len(runs[a]), len(runs[b]))
            if alike:
                assert clusters[a] == clusters[b]
    assert clusters[30] == clusters[3] == clusters[33]
    assert clusters[31] == clusters[4]
    assert clusters[32] == clusters[5]
    assert len(set(clusters)) == 30


# ---------------------------------------------------------------------------------------------------- prepare


def test_small_file_end_to_end(tmp_path: Path, scalerl_home: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"problem": problem(n), "answer": n, "difficulty": f"{n % 8}/8"} for n in range(1, 21)
    ]
    rows += [
        {"problem": problem(1), "answer": 1},  # 21: exact duplicate
        {"problem": problem(2), "answer": 999},  # 22: duplicate with another answer
        {"problem": "   ", "answer": 3},  # 23
        {"problem": problem(30), "answer": "  "},  # 24
        {"problem": problem(31), "answer": 31},  # 25: in the benchmark
        {"problem": problem(3) + " Really", "answer": 3},  # 26: near-copy of line 3
    ]
    write_lines(tmp_path / "rows.jsonl", rows)
    write_lines(tmp_path / "bench.jsonl", [{"question": problem(31).upper()}])
    recipe = recipe_for(tmp_path / "rows.jsonl", 'data.decontaminate=["bench.jsonl"]')
    folder = scalerl_home / "datasets" / dataset_key(recipe)
    record = prepare(recipe, folder)

    assert (record.train_rows, record.holdout_rows, record.rejected_rows) == (17, 4, 5)
    assert record.near_copies == 2
    rejected = {row["line"]: row["reason"] for row in pq.read_table(folder / "rejected.parquet").to_pylist()}
    assert rejected == {
        21: "duplicate: of line 1",
        22: "duplicate: of line 2, with another answer",
        23: "empty problem",
        24: "empty answer",
        25: "contaminated: equals a benchmark problem",
    }
    train, holdout = load_prompts(folder, "train"), load_prompts(folder, "holdout")
    assert {prompt.split for prompt in train} == {"train"}
    assert {prompt.split for prompt in holdout} == {"holdout"}
    # Nothing is lost, nothing is doubled, and the near-copies stand together in training.
    assert sorted(int(prompt.answer) for prompt in train + holdout) == sorted([*range(1, 21), 3])
    assert sum(prompt.answer == "3" for prompt in train) == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "holdout.parquet",
        "record.json",
        "rejected.parquet",
        "train.parquet",
    ]

    (stored,) = query.rows(scalerl_home / "warehouse", "select * from datasets")
    assert stored["dataset_id"] == record.dataset_id == folder.name
    assert (stored["train_rows"], stored["holdout_rows"], stored["rejected_rows"]) == (17, 4, 5)
    checks = query.rows(scalerl_home / "warehouse", "select * from validations")
    assert len(checks) == record.checks > 10
    assert all(check["success"] for check in checks)

    # A second call takes what is there; a fresh one elsewhere gives the same rows; another seed another holdout.
    assert prepare(recipe, folder) == record
    other = prepare(recipe, tmp_path / "again", warehouse_root=tmp_path / "w")
    assert load_prompts(tmp_path / "again", "holdout") == holdout
    assert isinstance(other, DatasetRecord)
    reseeded = recipe_for(tmp_path / "rows.jsonl", 'data.decontaminate=["bench.jsonl"]', seed=1)
    prepare(reseeded, tmp_path / "seed1", warehouse_root=tmp_path / "w")
    assert load_prompts(tmp_path / "seed1", "holdout") != holdout


def test_a_data_set_that_fails_its_checks_is_not_published(tmp_path: Path, scalerl_home: Path) -> None:
    rows = [{"problem": problem(n), "answer": n, "difficulty": "hard" if n == 7 else "1/8"} for n in range(12)]
    recipe = recipe_for(write_lines(tmp_path / "rows.jsonl", rows))
    folder = scalerl_home / "datasets" / dataset_key(recipe)
    with pytest.raises(UserError, match="difficulty"):
        prepare(recipe, folder)
    assert not folder.exists()
    assert list(scalerl_home.glob("datasets/*")) == []
    failed = query.rows(scalerl_home / "warehouse", "select * from validations where not success")
    assert [check["column"] for check in failed] == ["difficulty"]


def test_a_prompt_over_the_limit_is_rejected_with_its_length(tmp_path: Path, scalerl_home: Path) -> None:
    from scalerl.data import arithmetic

    rows = [{"problem": f"{n}+{n * n}=", "answer": n + n * n} for n in range(10, 40)]
    recipe = recipe_for(
        write_lines(tmp_path / "rows.jsonl", rows), "data.max_prompt_tokens=9", "rollout.prompt_template=plain"
    )
    record = prepare(recipe, tmp_path / "out", arithmetic.tokenizer())
    # <bos> 31+961= <think> is 9 tokens, <bos> 32+1024= <think> is 10: the squares of 32 to 39 are too long.
    assert record.longest_prompt_tokens == 9
    assert record.rejected_reasons == {"too long": 8}


def test_holdout_larger_than_the_file_is_refused(tmp_path: Path, scalerl_home: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"problem": problem(n), "answer": n} for n in range(3)])
    with pytest.raises(UserError, match="only 3 usable rows"):
        prepare(recipe_for(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_id_follows_the_content_not_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"problem": problem(n), "answer": n} for n in range(9)]
    first, second = write_lines(tmp_path / "a.jsonl", rows), write_lines(tmp_path / "b.jsonl", rows)
    assert dataset_key(recipe_for(first)) == dataset_key(recipe_for(second))
    assert dataset_key(recipe_for(first)) != dataset_key(recipe_for(first, "data.holdout=3"))
    assert dataset_key(recipe_for(first)) != dataset_key(recipe_for(first, seed=1))
    assert dataset_key(recipe_for(first)) == dataset_key(recipe_for(first, "optimizer.lr=1e-3"))
    write_lines(second, [*rows, {"problem": "x", "answer": 1}])
    assert dataset_key(recipe_for(first)) != dataset_key(recipe_for(second))
    with pytest.raises(UserError, match="no such file"):
        dataset_key(recipe_for(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="found neither in"):
        dataset_key(recipe_for(first, 'data.decontaminate=["none.jsonl"]'))


def test_an_unfinished_data_set_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"")
    with pytest.raises(UserError, match="no finished data set"):
        load_prompts(tmp_path, "train")


def test_sums(tmp_path: Path, scalerl_home: Path) -> None:
    sets = (
        "data.source=arithmetic",
        "model.kind=tiny-llama",
        "reward.verifier=integer",
        "data.holdout=50",
        "data.train=120",
    )
    recipe = recipes.load("scalerl", sets)
    record = prepare(recipe, tmp_path / "out")
    assert (record.train_rows, record.holdout_rows, record.longest_prompt_tokens) == (120, 50, 8)
    train, holdout = load_prompts(tmp_path / "out", "train"), load_prompts(tmp_path / "out", "holdout")
    assert {p.problem for p in train}.isdisjoint(p.problem for p in holdout)


def test_real_polaris_rows(shared_data: Path, tmp_path: Path, scalerl_home: Path) -> None:
    path = shared_data / "polaris_4200.jsonl"
    recipe = recipes.load("polaris", (f'data.path="{path}"', "reward.workers=2"))
    record = prepare(recipe, tmp_path / "out")
    assert (record.train_rows, record.holdout_rows, record.rejected_rows) == (3200, 1000, 0)
    train, holdout = load_prompts(tmp_path / "out", "train"), load_prompts(tmp_path / "out", "holdout")
    trained = {matching_text(prompt.problem) for prompt in train}
    assert trained.isdisjoint(matching_text(prompt.problem) for prompt in holdout)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(p.answer for p in train + holdout) == sorted(row["answer"].strip() for row in rows)
    benchmark = [
        text
        for name in ("math500.jsonl", "aime24.parquet", "aime25.parquet")
        for text in sources.problems(shared_data / name)
    ]
    assert len(benchmark) == 560
    assert trained.isdisjoint(matching_text(text) for text in benchmark)
    # One row is a MATH-500 problem typed anew; it may be asked, it is never trained on.
    typed_anew = "at least one real root. Determine the area of the graph of $S$"
    assert [p.split for p in train + holdout if typed_anew in p.problem] == ["holdout"]


def test_the_command_line_names_bad_input_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"problem": "a", "answer": 1}\n{"problem": "b"}\n')
    code = "import sys, typer\nfrom flows import cli_data\nfrom warehouse.errors import UserError\napp = typer.Typer()\ncli_data.register(app)\n"
    code += "app.command('other')(lambda: None)\ntry:\n    app(standalone_mode=False)\nexcept UserError as error:\n    sys.exit(print(error, file=sys.stderr) or 2)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, "prepare", "scalerl", "--source", "jsonl", "--path", "bad.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SCALERL_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "bad.jsonl line 2: no answer" in done.stderr
    assert not (tmp_path / "home" / "datasets").exists()


# ---------------------------------------------------------------------------------------------------- more layouts


def test_math_takes_the_answer_from_the_solutions_last_box(tmp_path: Path) -> None:
    rows = [
        {
            "problem": "a",
            "level": "Level 5",
            "solution": r"first \boxed{1}, then \boxed{\frac{1}{2}}.",
            "difficulty": 5,
        },
        {"problem": "b", "solution": "no box at all"},
        {"problem": "c", "solution": r"\boxed{9}", "answer": "8"},
    ]
    found = list(sources.read(write_lines(tmp_path / "m.jsonl", rows), "math"))
    assert [(row.answer, row.difficulty, row.unusable) for row in found] == [
        (r"\frac{1}{2}", None, ""),
        ("no box at all", None, "answer: the solution ends in no box that is closed"),
        ("8", None, ""),
    ]


def test_a_json_list_is_read_element_by_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of any length give the rows of the whole file, numbers with the digits that the file holds."""
    rows = [{"problem": f'[{n}] \\{{ "x", ] é', "answer": n, "solution": "s" * n} for n in range(40)]
    path = tmp_path / "deepscaler.json"
    text = json.dumps(rows, indent=1).replace('"answer": 7,', '"answer": 7.50,')
    path.write_text(text)
    for chunk in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(sources, "_CHUNK", chunk)
        found = list(sources.read(path, "deepscaler"))
        assert [row.line for row in found] == list(range(1, 41))
        assert [row.problem for row in found] == [row["problem"] for row in rows]
        assert [row.answer for row in found] == [str(n) if n != 7 else "7.50" for n in range(40)]
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.problem for row in sources.read(tmp_path / "lines.json", "dapo")] == [row["problem"] for row in rows]


@pytest.mark.parametrize("text", ["[", '[{"problem": "a", "answer": 1}', '[{"problem": "a"', "[1 2]", '"text"', "[,]"])
def test_a_broken_json_list_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError) as raised:
        list(sources.read(tmp_path / "x.json", "jsonl"))
    assert "x.json" in str(raised.value) and "\n" not in str(raised.value)


def test_what_dapo_puts_around_a_problem_is_taken_off(tmp_path: Path) -> None:
    before = "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    turn = {"role": "user", "content": f"{before}What is 2+2?{after}"}
    table = pa.Table.from_pylist([{"prompt": [turn], "reward_model": {"ground_truth": "4", "style": "rule"}}])
    pq.write_table(table, tmp_path / "dapo.parquet")
    assert list(sources.read(tmp_path / "dapo.parquet", "dapo")) == [sources.Row(1, "What is 2+2?", "4", None)]


def test_packed_lines_are_read_too(tmp_path: Path) -> None:
    import gzip

    packed = gzip.compress(b'{"problem": "a", "answer": 1}\n' * 500)
    (tmp_path / "x.jsonl.gz").write_bytes(packed)
    assert len(list(sources.read(tmp_path / "x.jsonl.gz", "jsonl"))) == 500
    (tmp_path / "x.jsonl.gz").write_bytes(packed[:-20])
    with pytest.raises(UserError, match="cannot be unpacked"):
        list(sources.read(tmp_path / "x.jsonl.gz", "jsonl"))


def test_the_help_names_every_source() -> None:
    from typing import get_args

    from flows.cli_data import SOURCES

    assert sorted(SOURCES.split(", ")) == sorted(get_args(recipes.Source.model_fields["source"].annotation))
