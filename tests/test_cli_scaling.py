"""The commands fit, forecast, backtest, compare, import and plan-evaluation, as a user calls them."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flows.cli import run
from scalerl.scaling.simulate import Truth, simulate

HEAVY = (
    "torch",
    "ray",
    "prefect",
    "vllm",
    "transformers",
    "great_expectations",
    "pandas",
    "matplotlib",
    "distributed",
    "scipy.stats",
    "wandb",
    "mlflow",
)


def write_curve(
    path: Path, a: float = 0.61, b: float = 1.9, *, end: float = 16000.0, seed: int = 0, column: str = "gpu_hours"
) -> Path:
    x = np.arange(1500.0, end + 1, 150.0)
    y = simulate(np.random.default_rng(seed), Truth(a, b, 2500.0, 0.4), x)[0]
    rows = [f"{int(c / 15)},{c},{r}" for c, r in zip(x, y, strict=True)]
    path.write_text("\n".join([f"step,{column},val_score", *rows]))
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(a) for a in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    code, out, err = call(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_fit_says_numbers_with_named_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capsys,
        "fit",
        write_curve(tmp_path / "a.csv"),
        "--r0",
        0.4,
        "--at",
        64000,
        "--for",
        0.6,
        "--for",
        0.9,
        "--windows",
    )
    assert (code, err) == (0, "")
    for words in (
        "verdict: identified",
        "run interval",
        "recipe interval",
        "gpu-hours",
        "beyond the asymptote",
        "Sensitivity to the window",
        "back-test",
    ):
        assert words in out
    assert re.search(r"A \(asymptote\)\s+0\.6[01]", out)


def test_fit_json_is_complete_and_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_curve(tmp_path / "a.csv")
    first = call_json(capsys, "fit", path, "--r0", 0.4, "--seed", 3)
    assert first == call_json(capsys, "fit", path, "--r0", 0.4, "--seed", 3)
    (curve,) = first["curves"]
    assert curve["fit"]["a"] == pytest.approx(0.61, abs=0.01)
    assert set(curve["intervals"]) == {"run", "run_bootstrap", "recipe"} and len(curve["windows"]) > 3
    short = call_json(capsys, "fit", write_curve(tmp_path / "b.csv", end=3500), "--r0", 0.4)["curves"][0]
    assert short["fit"]["a"] is None and short["fit"]["verdict"] == "not identified"


def test_the_papers_method_is_an_option(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared_data / "paper_fig1_dense8b.csv"
    (curve,) = call_json(capsys, "fit", path, "--method", "paper", "--r0", 0.4017, "--from", 1500, "--to", 45000)[
        "curves"
    ]
    assert (curve["fit"]["a"], round(curve["fit"]["c_mid"]), round(curve["fit"]["b"], 3)) == (0.63, 10176, 1.899)


def test_several_files_make_one_table_and_a_bad_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write_curve(tmp_path / "good.csv"), tmp_path / "bad.csv"
    bad.write_text("step,pass_rate\n1,500\n2,700\n")
    code, out, _ = call(capsys, "fit", good, write_curve(tmp_path / "other.csv", 0.55, seed=1), bad, "--r0", 0.4)
    assert code == 0 and "good" in out and "other" in out and "left out" in out and "neither shares" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "nowhere.csv"], "no such file or folder"),
        (["fit", "{curve}", "--r0", "much"], "give a number, measured or fitted"),
        (["fit", "{curve}", "--from", "later"], "give a number, epoch, auto or none"),
        (["fit", "{curve}", "--from", "epoch"], "no second epoch"),
        (["fit", "{curve}", "--method", "magic"], "choose refined, robust, fast or paper"),
        (["fit", "{curve}", "--reward", "accuracy"], "no column of numbers 'accuracy'"),
        (["fit", "{curve}", "--axis", "joules"], "choose one of compute, tokens, flops, steps"),
        (["fit", "{curve}", "--figure", "x.pdf"], "ends in .png or .svg"),
        (["fit", "{curve}", "--html", "x.pdf"], "ends in .html"),
        (["fit", "{curve}", "--format", "xls"], "choose auto, table"),
        (["fit"], "holds no run yet"),
        (["forecast", "{curve}", "--at", "-5"], "give positive values"),
        (["compare", "{curve}"], "at least two"),
        (["compare", "{curve}", "--same", "x=nobody"], "expected NAME=RUN,RUN"),
        (["backtest", "--all"], "no run with an evaluation"),
        (["backtest", "{curve}", "--fraction", "2"], "between 0 and 1"),
        (["plan-evaluation"], "give --a, --b"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, scalerl_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    curve = write_curve(tmp_path / "curve.csv")
    code, out, err = call(capsys, *[a.format(curve=curve) for a in arguments])
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir() if p != scalerl_home) == ["curve.csv"]


def test_figures_and_the_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_curve(tmp_path / "a.csv"), write_curve(tmp_path / "b<script>.csv", 0.6, 1.5, seed=1)
    files = {
        name: tmp_path / name
        for name in ("one.png", "one.svg", "two.png", "page.html", "slopes.svg", "backtest.png", "again.svg")
    }
    call_json(capsys, "fit", a, "--r0", 0.4, "--figure", files["one.png"])
    call_json(capsys, "fit", a, "--r0", 0.4, "--figure", files["one.svg"])
    call_json(capsys, "fit", a, "--r0", 0.4, "--figure", files["again.svg"])
    assert call_json(capsys, "fit", a, b, "--r0", 0.4, "--figure", files["two.png"], "--html", files["page.html"])[
        "files"
    ]
    call_json(capsys, "compare", a, b, "--r0", 0.4, "--linearised", files["slopes.svg"])
    call_json(capsys, "backtest", a, "--r0", 0.4, "--figure", files["backtest.png"])
    for name, path in files.items():
        data = path.read_bytes()
        assert len(data) > 5000, name
        assert data[:4] == b"\x89PNG" if name.endswith("png") else b"<" in data[:20]
    assert files["one.svg"].read_bytes() == files["again.svg"].read_bytes()
    page = files["page.html"].read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    data = json.loads(page.split('id="data">', 1)[1].split("</script>", 1)[0])
    assert [c["name"] for c in data] == ["a", "b<script>"]


def test_imported_runs_are_runs_of_the_warehouse(
    tmp_path: Path, scalerl_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from scalerl.home import warehouse_root
    from warehouse.query import rows

    files = [write_curve(tmp_path / "strong.csv", 0.63), write_curve(tmp_path / "weak.csv", 0.55, seed=1)]
    first = call_json(capsys, "import", *files, "--r0", 0.4, "--prompts", 1000, "--samples", 16)
    assert [r["existed"] for r in first["runs"]] == [False, False]
    again = call_json(capsys, "import", *files, "--r0", 0.4, "--prompts", 1000, "--samples", 16)
    assert [r["existed"] for r in again["runs"]] == [True, True]
    board = rows(warehouse_root(), "select run_id, rank, a, verdict from leaderboard order by rank")
    assert [r["run_id"] for r in board] == [r["run_id"] for r in first["runs"]]
    assert board[0]["a"] == pytest.approx(0.63, abs=0.01)
    points = rows(
        warehouse_root(), "select count(*) as n, max(compute) as last from curve where run_id = ?", [board[0]["run_id"]]
    )
    assert points == [{"n": 97, "last": pytest.approx(15900.0)}]
    assert rows(warehouse_root(), "select distinct source from runs") == [{"source": "import"}]
    ids = [r["run_id"] for r in first["runs"]]
    stored = call_json(capsys, "fit", ids[0], "--r0", 0.4)["curves"][0]
    direct = call_json(capsys, "fit", files[0], "--r0", 0.4, "--prompts", 1000, "--samples", 16)["curves"][0]
    assert stored["fit"]["optimum"] == pytest.approx(direct["fit"]["optimum"])
    compared = call_json(capsys, "compare", *ids, "--r0", 0.4, "--save")
    assert compared["pairs"][0]["word"] == "better"
    saved = rows(warehouse_root(), "select run_id, other_run_id, winner, verdict from comparisons")
    assert saved == [{"run_id": ids[0], "other_run_id": ids[1], "winner": ids[0], "verdict": "higher_ceiling"}]
    assert call_json(capsys, "backtest", "--all", "--r0", 0.4, "--fraction", 0.5)["summary"][0]["runs"] == 2
    code, _, err = call(capsys, "fit", "import-stron")
    assert code == 0, err


def test_plans_from_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_curve(tmp_path / "a.csv")
    plan = call_json(
        capsys,
        "plan-evaluation",
        path,
        "--r0",
        0.4,
        "--budget",
        10000,
        "--prompts",
        1000,
        "--samples",
        16,
        "--evaluations",
        40,
    )
    assert plan["chosen"]["within"] >= 0.9
    code, _, err = call(
        capsys, "plan-evaluation", write_curve(tmp_path / "b.csv", end=3500), "--r0", 0.4, "--budget", 10000
    )
    assert code == 2 and "not identified" in err


BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {blocked!r} or name.split('.')[0] in {blocked!r}:
            raise ImportError('blocked: ' + name)
sys.meta_path.insert(0, Block())
from flows.cli import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "command", [["fit"], ["fit", "--json", "--windows"], ["forecast"], ["backtest"], ["compare"], ["import"]]
)
def test_nothing_heavy_is_imported(tmp_path: Path, command: list[str]) -> None:
    files = [str(write_curve(tmp_path / "a.csv")), str(write_curve(tmp_path / "b.csv", 0.55, seed=1))]
    given = files if command[0] == "compare" else files[:1]
    code = BLOCKER.format(blocked=HEAVY)
    environment = {"PATH": "", "SCALERL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, command[0], *given, *command[1:]], capture_output=True, text=True, timeout=120, env=environment,
        cwd=Path(__file__).resolve().parents[1], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and done.stderr == ""


def test_the_first_output_comes_soon(tmp_path: Path) -> None:
    """CPU seconds of a whole `scalerl fit`, not wall time: other work on the machine must not decide it. Two seconds is the promise on an idle disk."""
    import resource

    path = write_curve(tmp_path / "a.csv")
    command = [sys.executable, "-m", "flows.cli", "fit", str(path)]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=Path(__file__).resolve().parents[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert seconds < 8, f"{seconds:.1f} CPU-s, {time.perf_counter() - begin:.1f} s"


def test_what_only_costs_time_is_not_imported(tmp_path: Path) -> None:
    """Where pandas is installed, Arrow would import it for any column it turns into an array; most of the first second went there."""
    code = "import sys; from flows.cli import run; run(sys.argv[1:]); print(*{'pandas', 'scipy.stats', 'matplotlib', 'torch'} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", str(write_curve(tmp_path / "a.csv"))], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).resolve().parents[1], check=True,
    )  # fmt: skip
    assert done.stderr.strip() == ""


def test_repeats_are_grouped_by_their_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.arange(1500.0, 16001.0, 300.0)
    lines = ["recipe,seed,gpu_hours,val_score"]
    for recipe, a in (("good", 0.62), ("poor", 0.56)):
        for seed in (1, 2):
            y = simulate(np.random.default_rng(seed), Truth(a, 1.9, 2500.0, 0.4), x)[0]
            lines += [f"{recipe},{seed},{c},{r}" for c, r in zip(x, y, strict=True)]
    path = tmp_path / "repeats.csv"
    path.write_text("\n".join(lines))
    record = call_json(capsys, "compare", path, "--by-recipe", "--r0", "0.4")
    assert [(a["name"], a["runs"]) for a in record["ranking"]] == [("good", 2), ("poor", 2)]
    assert record["margin_source"] == "repeats (4 runs)"
    assert all(a["recipe_interval_b"]["kind"] == "recipe" for a in record["ranking"])
    code, out, _ = call(capsys, "compare", path, "--by-recipe", "--r0", "0.4")
    assert code == 0 and "good, recipe intervals from 2 repeats: B [" in out


@pytest.mark.parametrize("value", ["40", "-0.1", "1", "nan", "inf"])
def test_a_start_that_is_no_share_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    code, out, err = call(capsys, "fit", write_curve(tmp_path / "a.csv"), f"--r0={value}")
    assert (code, out) == (2, "") and "R_0 is a share" in err
