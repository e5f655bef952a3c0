"""The report: what it says, where its marks stand, that it escapes everything, and that a browser loads nothing else for it."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import synthetic_run as made
from hypothesis import given
from hypothesis import strategies as st

from scalerl.report import figure, find_run, write_report
from scalerl.report.markup import duration, element, html, number, tick
from scalerl.report.panels import thin
from scalerl.report.svg import Scale, linear_ticks, log_ticks, padded
from scalerl.report.traces import SHOWN_HEAD, SHOWN_TAIL, show_trace, tokens_of
from warehouse import query, writer
from warehouse.errors import UserError

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Page(HTMLParser):
    """A parsed page: elements with their attributes, visible text, and whether every tag was closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def joined(self) -> str:
        return "".join(self.words)


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report") / "warehouse"
    made.write_run(root)
    made.write_import(root)
    made.write_run(root, "tiny-s3-begun", steps=20)
    made.write_run(root, "tiny-s3-first", steps=0)
    made.write_run(root, "tiny-s3-unbent", steps=32, every=2)
    return root


def written(root: Path, run_id: str, folder: Path) -> str:
    return write_report(root, run_id, folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(warehouse, made.RUN, tmp_path_factory.mktemp("page"))


# What it says


def test_names_the_run_and_all_parts(page: str) -> None:
    text = Page(page).text
    for part in (
        "Curve",
        "Fit",
        "Forecast",
        "Evaluations",
        "Training",
        "Cut, dropped, stale",
        "Entropy",
        "Compute",
        "Attempts and incidents",
        "Recipe",
        "Data checks",
        "Sample traces",
    ):
        assert f" {part} " in text
    for word in (made.RUN, "tiny", "asynchronous", "identified", "finished, step 240 of 240"):
        assert word in text


def test_fit_finds_the_sigmoid_that_made_the_run(page: str) -> None:
    text = Page(page).text
    found = re.search(r"A, ceiling ([\d.]+) ([\d.]+) to ([\d.]+) ([\d.]+) to ([\d.]+)", text)
    assert found, "A with two intervals"
    a, run_lo, run_hi, recipe_lo, recipe_hi = map(float, found.groups())
    assert abs(a - made.A) < 0.02
    assert run_lo < a < run_hi and recipe_lo < run_lo and run_hi < recipe_hi
    middle = re.search(r"C_mid, CPU core hours ([\d.]+)", text)
    assert middle and abs(float(middle[1]) / made.C_MID - 1) < 0.1
    assert "this run" in text and "a repeat of the recipe" in text


def test_half_budget_forecast_is_told_against_what_happened(page: str) -> None:
    found = re.search(r"misses the (\d+) evaluations of the second half by ([\d.]+) on average", Page(page).text)
    assert found and int(found[1]) == 12
    assert 0 < float(found[2]) < 0.03


def test_shows_every_surviving_evaluation_and_no_abandoned_step(page: str, warehouse: Path) -> None:
    text = Page(page).text
    rows = query.rows(
        warehouse, "SELECT step, pass_rate, stderr FROM evaluations WHERE run_id = ? ORDER BY step", [made.RUN]
    )
    assert len(rows) == 25
    for row in rows:
        assert re.search(rf" {row['step']} [\d.]+ [\d.kM]+ {row['pass_rate']:.3f} {row['stderr']:.3f} ", text), row[
            "step"
        ]
    raw = query.rows(warehouse, "SELECT max(pass_rate) AS highest FROM raw.train_steps WHERE run_id = ?", [made.RUN])
    assert raw[0]["highest"] == 0.999
    assert "step 121: 0." in page and not re.search(r"step 12[1-4]: 0\.999", page)


def test_compute_by_role_adds_up_to_what_was_paid(page: str) -> None:
    text = Page(page).text
    numbers = [
        float(re.search(rf"{name} ([\d.]+) [\d.]+%", text)[1])
        for name in ("generators, busy", "trainers, busy", "held, idle", "evaluation", "starts, stops and lost steps")
    ]  # type: ignore[index]
    paid = float(re.search(r"paid \(compute_paid\) ([\d.]+) 100", text)[1])  # type: ignore[index]
    assert sum(numbers) == pytest.approx(paid, abs=2e-4)
    assert re.search(r"on the curve \(compute_curve\) 0\.120 ", text)


def test_failed_checks_come_with_the_rows_that_break_them(page: str) -> None:
    text = Page(page).text
    assert "1 of 3 expectations are broken." in text
    assert "2 rows: row-17, row-<18>" in text
    assert text.index("✗ broken") < text.index("✓ holds")


def test_recipe_lists_what_differs_from_scalerl(page: str) -> None:
    text = Page(page).text
    assert re.search(r'data\.source "polaris" "arithmetic"', text)
    assert re.search(r"training\.steps 7400 \d+", text)
    assert text.count("loss.kind") == 1  # as in scalerl: only in the whole recipe


def test_attempts_and_incidents(page: str) -> None:
    text = Page(page).text
    assert "attempt 1 ended without a word" in text and "no end recorded" in text and "4 min 0 s" in text
    assert "1 × generator-lost" in text


# Early, odd and imported runs


def test_a_run_that_has_only_begun_has_no_fit_yet(warehouse: Path, tmp_path: Path) -> None:
    text = Page(written(warehouse, "tiny-s3-begun", tmp_path)).text
    assert "No fit yet" in text and "A, ceiling" not in text
    first = Page(written(warehouse, "tiny-s3-first", tmp_path)).text
    assert "No evaluation with compute above zero yet." in first


def test_a_fit_that_is_not_identified_shows_no_bare_a(warehouse: Path, tmp_path: Path) -> None:
    source = written(warehouse, "tiny-s3-unbent", tmp_path)
    text = Page(source).text
    assert "not identified" in text
    assert re.search(r"A, ceiling not known [\d.]+ to [\d.]+", text)
    assert "ceiling A not known" in text and not re.search(r"A 0\.\d", text)
    assert text.index("not to be quoted") < text.index("Least-squares optima")
    assert "rule asymptote" not in source


def test_a_stored_fit_of_the_last_evaluation_is_shown_as_stored(tmp_path: Path) -> None:
    root = tmp_path / "warehouse"
    made.write_run(root)
    fit = {
        "axis": "compute", "unit": "CPU core hours", "form": "sigmoid", "method": "refined", "n_points": 24, "window_lo": 0.0, "r0": 0.08, "a": 0.8123,
        "b": 1.5, "c_mid": 0.021, "a_run_lo": 0.80, "a_run_hi": 0.82, "b_run_lo": 1.4, "b_run_hi": 1.6, "c_mid_run_lo": 0.02, "c_mid_run_hi": 0.022,
        "a_recipe_lo": 0.79, "a_recipe_hi": 0.83, "confidence": 0.9, "verdict": "identified", "reason": "", "settings": "{}", "at": made.START,
    }  # fmt: skip
    writer.append(root, "fits", made.RUN, [fit | {"step": 230, "a": 0.7777}])
    assert "A, ceiling 0.84" in Page(written(root, made.RUN, tmp_path)).text, "not the older fit"
    foretold = {
        "step": 240,
        "axis": "compute",
        "unit": "CPU core hours",
        "kind": "backtest",
        "fraction": 0.5,
        "reward": 0.81,
        "lo": 0.7,
        "hi": 0.9,
    }
    rows = [
        foretold | {"at_compute": 0.1, "actual": 0.80, "miss": 0.01},
        foretold | {"at_compute": 0.12, "actual": 0.84, "miss": 0.03},
    ]
    writer.append(root, "fits", made.RUN, [fit | {"step": 240}])
    writer.append(root, "forecasts", made.RUN, rows)
    text = Page(written(root, made.RUN, tmp_path)).text
    assert "A, ceiling 0.812 0.800 to 0.820 0.790 to 0.830" in text
    assert "misses the 2 evaluations of the second half by 0.020 on average" in text


def test_a_run_that_never_rises_has_a_failed_fit_and_no_curve(tmp_path: Path) -> None:
    root = tmp_path / "warehouse"
    rows = [
        {"step": s, "benchmark": "holdout", "task": "math", "pass_rate": 0.3 + 0.01 * (-1) ** (s // 10), "compute_curve": float(s), "prompts": 100, "samples": 4}
        for s in range(0, 200, 10)
    ]  # fmt: skip
    writer.append(root, "runs", "flat", [{"recipe_name": "flat", "source": "import"}])
    writer.append(root, "evaluations", "flat", rows)
    source = written(root, "flat", tmp_path)
    text = Page(source).text
    assert re.search(r"(Failed|Not identified) over compute", text) and "A, ceiling not known" in text
    assert "rule asymptote" not in source and "accelerator hours" in text


def test_an_imported_run_has_evaluations_only(warehouse: Path, tmp_path: Path) -> None:
    text = Page(written(warehouse, "other-trainer", tmp_path)).text
    assert "identified" in text and "GPU hours" in text and "Imported from another trainer." in text
    assert "Sample traces" not in text and "Training" not in text and "nan" not in text.lower().split()
    found = re.search(r"A, ceiling ([\d.]+)", text)
    assert found and abs(float(found[1]) - 0.6) < 0.01


def test_run_is_found_by_name_by_beginning_and_newest(warehouse: Path, tmp_path: Path) -> None:
    assert find_run(warehouse, made.RUN) == made.RUN
    assert find_run(warehouse, "tiny-s3-0") == made.RUN
    assert find_run(warehouse, None) in {row["run_id"] for row in query.rows(warehouse, "SELECT run_id FROM runs")}
    with pytest.raises(UserError, match="more than one"):
        find_run(warehouse, "tiny-s3")
    with pytest.raises(UserError, match=f"did you mean .*{made.RUN}"):
        find_run(warehouse, "tiny-s3-0123abce")
    with pytest.raises(UserError, match="scalerl run"):
        find_run(tmp_path / "nowhere", None)
    with pytest.raises(UserError):
        write_report(warehouse, "unknown", tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_needs_neither_torch_nor_prefect_nor_ray(warehouse: Path, tmp_path: Path) -> None:
    blocked = ("torch", "prefect", "ray", "transformers", "great_expectations", "matplotlib", "dask")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from pathlib import Path; from scalerl.report import write_report;"
        f"write_report(Path({str(warehouse)!r}), 'tiny-s3-begun', Path({str(tmp_path / 'r.html')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "r.html").stat().st_size > 10_000


# Safety and form


def test_model_text_is_escaped_everywhere(page: str) -> None:
    parsed = Page(page)
    assert sum(tag == "script" for tag, _ in parsed.elements) == 1
    shown = '<script>alert("x")</script>&amp;\u2407'
    assert parsed.joined().count(shown) >= 4  # prompt, think part, answer, extracted answer
    assert "generator 0 ended with signal 9; 14 unfinished traces went back to the queue <b>&" in parsed.text


def test_page_is_well_formed_and_refers_to_nothing_outside(page: str) -> None:
    parsed = Page(page)
    assert parsed.faults == [] and parsed.open == []
    for tag, attributes in parsed.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attributes.get(name, "#").startswith(("#", "data:,")), (tag, attributes)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    policy = next(a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "unsafe-inline" not in policy.split("script-src")[1]
    identifiers = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))


def test_charts_say_in_words_what_they_show(page: str) -> None:
    charts = [a for tag, a in Page(page).elements if tag == "svg"]
    assert len(charts) > 20
    assert all(chart.get("role") == "img" and len(chart.get("aria-label", "")) > 20 for chart in charts)
    assert "nan" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_points_stand_where_the_tick_labels_say(page: str, warehouse: Path, scale: str) -> None:
    """Read the plot as a person does: positions of ticks give the scales, and the dots must then have the evaluations' values."""
    pane = re.search(rf'class="pane axis-compute scale-{scale}"><svg[^>]*>(.*?)</svg>', page, re.DOTALL)
    assert pane
    ticks = [
        (float(x), float(y), label)
        for x, y, label in re.findall(r'<text class="tick" x="([\d.]+)" y="([\d.]+)"[^>]*>([\d.]+)</text>', pane[1])
    ]
    bottom = max(y for _, y, _ in ticks)
    across = [(x, float(label)) for x, y, label in ticks if y == bottom and float(label) > 0]
    up = [(y, float(label)) for _, y, label in ticks if y != bottom]
    to_axis = np.log if scale == "log" else lambda v: np.asarray(v, dtype=float)
    x_line = np.polyfit([p for p, _ in across], to_axis([v for _, v in across]), 1)
    y_line = np.polyfit([p for p, _ in up], [v for _, v in up], 1)
    dots = [
        (float(x), float(y)) for x, y in re.findall(r'<circle class="dot point" cx="([\d.]+)" cy="([\d.]+)"', pane[1])
    ]
    rows = query.rows(
        warehouse,
        "SELECT compute_curve, pass_rate FROM evaluations WHERE run_id = ? AND step > 0 ORDER BY step",
        [made.RUN],
    )
    assert len(dots) == len(rows) == 24 and len(across) >= 3 and len(up) >= 3
    for (px, py), row in zip(dots, rows, strict=True):
        assert np.polyval(x_line, px) == pytest.approx(
            to_axis(row["compute_curve"]), abs=0.02 if scale == "log" else 2e-4
        )
        assert np.polyval(y_line, py) == pytest.approx(row["pass_rate"], abs=2e-3)


# Traces


def trace(**changes: object) -> dict:
    ids = [8, 18, 20, 4, 13, 6, 2]  # 3 ; t </think> 8 1 <eos>
    base = {
        "step": 7, "kind": "train", "prompt_id": "p", "sample": 0, "prompt_text": "<bos>2+1=<think>", "text": "3;t</think>81<eos>", "tokens": ids,
        "forced": [False, False, True, True, False, False, False], "logprobs": [-0.5] * 7, "versions": [3, 3, 4, 4, 5, 5, 6], "answer": "81",
        "outcome": "correct", "reward": 1.0, "finish": "interrupted_ended", "cache_rebuilt": False,
    }  # fmt: skip
    return base | changes


def test_token_ids_are_shown_as_the_model_read_them_forced_ones_marked() -> None:
    shown = Page(show_trace(trace(prompt_tokens=[1, 7, 15, 6, 16, 3]), "t</think>"))
    assert "Token ids: 6 of the prompt, 7 of the completion" in shown.text
    assert "1 7 15 6 16 3" in shown.text
    marked = show_trace(trace(prompt_tokens=[1]), "t</think>")
    assert '<span class="forced">20 4 </span>' in marked and "<span>8 18 </span>" in marked
    # Rows from before the column are shown without.
    assert "Token ids" not in Page(show_trace(trace(), "t</think>")).text
    assert "Token ids" not in Page(show_trace(trace(prompt_tokens=None), "t</think>")).text


def test_every_token_of_a_character_tokenizer_is_shown_in_place() -> None:
    tokens = tokens_of(trace())
    assert tokens is not None
    assert [t.text for t in tokens] == ["3", ";", "t", "</think>", "8", "1", "<eos>"]
    shown = Page(show_trace(trace(), "t</think>"))
    forced = [a for _, a in shown.elements if "forced" in a.get("class", "").split()]
    assert [a["data-tip"] for a in forced] == ["forced, masked out of the loss"] * 2
    assert (
        next(a["data-tip"] for _, a in shown.elements if "log p" in a.get("data-tip", ""))
        == "policy version 3, log p -0.50"
    )
    assert "versions 3–6" in shown.text and "7 tokens, 2 forced" in shown.text


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "three;t</think>81<eos>"},  # more characters than tokens
        {"tokens": [8, 8, 20, 4, 13, 6, 2]},  # one id would stand for two texts
        {"logprobs": [-0.5]},
    ],
)
def test_other_tokenizers_show_text_and_a_strip_of_tokens(changes: dict) -> None:
    odd = trace(**changes)
    assert tokens_of(odd) is None
    shown = Page(show_trace(odd, "t</think>"))
    marked = [a for tag, a in shown.elements if a.get("class") == "forced"]
    assert len(marked) == 1, "the phrase in the text"
    cells = [a for _, a in shown.elements if "flex-grow" in a.get("style", "")]
    assert [c["style"] for c in cells] == ["flex-grow:2", "flex-grow:2", "flex-grow:2", "flex-grow:1"]
    assert "forced" in cells[1]["class"] and "forced" not in cells[0]["class"]


def test_line_feeds_at_the_start_of_an_answer_survive() -> None:
    """A browser drops one line feed right after <pre>; what is left must be the text."""
    shown = show_trace(trace(text="why</think>\n\n81", logprobs=[]), "")
    assert [part.removeprefix("\n") for part in re.findall(r"<pre>(.*?)</pre>", shown, re.DOTALL)] == [
        "why&lt;/think&gt;",
        "\n\n81",
    ]


def test_a_think_part_that_nothing_closed_is_not_an_answer() -> None:
    cut = trace(text="3;t;3;t", tokens=[8, 18, 20, 18, 8, 18, 20], forced=[False] * 7, finish="truncated", answer="")
    names = re.findall(r"<h4>(\w+)</h4>", show_trace(cut, ""))
    assert names == ["Prompt", "Think"]


def test_long_traces_are_cut_in_the_middle_and_say_so() -> None:
    text = "a" * SHOWN_HEAD + "b" * 1234 + "c" * SHOWN_TAIL
    long = trace(
        text="x</think>" + text, tokens=list(range(9)), forced=[False] * 9, versions=[1] * 9, logprobs=[0.0] * 9
    )
    shown = Page(show_trace(long, "")).joined()
    assert "1,234 characters left out" in shown
    assert (
        "a" * SHOWN_HEAD in shown
        and "b" not in shown.split("Answer")[1].split("characters")[0]
        and "c" * SHOWN_TAIL in shown
    )


# Numbers, scales, series


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"), (float("nan"), "–"), (0, "0"), (0.0, "0"), (240, "240"), (1234, "1,234"), (0.0197, "0.0197"), (12345, "12.3k"), (1.2e6, "1.20M"),
        (3.18e11, "318G"), (4e-5, "4.00e-5"), (2e18, "2.00e+18"), (-0.5, "-0.500"), (0.99996, "1.000"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, expected: str) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.1, "0.1"), (0.0, "0"), (8000, "8k"), (14000, "14k"), (2500, "2.5k"), (4e-5, "4e-5"), (100, "100"), (1e6, "1M")],
)
def test_ticks_as_written(value: float, expected: str) -> None:
    assert tick(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(4.21, "4.2 s"), (750, "12 min 30 s"), (12000, "3 h 20 min"), (187200, "2 d 4 h"), (None, "–")],
)
def test_durations(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


@given(st.text())
def test_escaping_keeps_the_text_and_makes_no_element(text: str) -> None:
    parsed = Page(element("p", text, data_tip=text))
    assert len(parsed.elements) == 1 and parsed.faults == []
    assert "<" not in html(text) and '"' not in html(text)


@given(st.floats(-1e3, 1e3), st.floats(1e-2, 1e6), st.integers(2, 10))
def test_linear_ticks_are_round_inside_and_few(lo: float, width: float, count: int) -> None:
    hi = lo + width
    ticks = linear_ticks(lo, hi, count)
    slack = width * 1e-6
    assert all(lo - slack <= value <= hi + slack for value in ticks) and len(ticks) <= count + 1
    steps = np.diff(ticks)
    if len(steps):
        mantissa = steps[0] / 10.0 ** np.floor(np.log10(steps[0]) + 1e-9)
        assert np.allclose(steps, steps[0], rtol=1e-4) and min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-3


@given(st.floats(1e-9, 1e9), st.floats(1.05, 1e9), st.integers(4, 10))
def test_log_ticks_lie_inside_and_are_few(lo: float, factor: float, count: int) -> None:
    ticks = log_ticks(lo, lo * factor, count)
    assert all(lo * (1 - 1e-6) <= value <= lo * factor * (1 + 1e-6) for value in ticks) and len(ticks) <= count + 1


def test_scales_by_hand() -> None:
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(1, 100, 0, 200, log=True)(10) == pytest.approx(100)
    assert Scale(0, 1, 300, 20)(1) == 20
    assert padded([0.2, 0.4], pad=0.5) == pytest.approx((0.1, 0.5))
    assert padded([], floor=0) == (0.0, 1.0)
    assert padded([0.5, 0.5])[0] < 0.5 < padded([0.5, 0.5])[1]


def test_thinned_series_keep_means_and_extremes() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(7400)
    line = thin(list(range(1, 7401)), list(values))
    width = 25  # 7400 / 300, rounded up
    assert len(line.mean) == 296
    assert np.allclose(line.mean, values.reshape(-1, width).mean(axis=1)) and np.allclose(
        line.high, values.reshape(-1, width).max(axis=1)
    )
    gap = thin([1, 2, 3], [1.0, None, float("inf")])
    assert gap.mean[0] == 1.0 and np.isnan(gap.mean[1]) and np.isnan(gap.mean[2]) and gap.smooth == []


# Figure and command


def test_figure_is_written_twice_the_same_and_names_the_fit(warehouse: Path, tmp_path: Path) -> None:
    first = figure(warehouse, made.RUN, tmp_path / "a" / "curve.png")
    again = figure(warehouse, made.RUN, tmp_path / "b" / "curve.png")
    assert first == tmp_path / "a" / "curve.png" and again
    assert first.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and first.read_bytes() == again.read_bytes()
    assert first.with_suffix(".svg").read_bytes() == again.with_suffix(".svg").read_bytes()
    words = " ".join(ET.parse(first.with_suffix(".svg")).getroot().itertext())
    assert made.RUN in words and "A = 0.8" in words and "core" in words
    assert figure(warehouse, "tiny-s3-first", tmp_path / "none.png") is None


def test_command_writes_report_and_figure(
    warehouse: Path, scalerl_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows.cli import run

    shutil.copytree(warehouse, scalerl_home / "warehouse")
    assert run(["report", "tiny-s3-begun"]) == 0
    said = capsys.readouterr().out.split()
    assert said == [
        str(scalerl_home / "runs" / "tiny-s3-begun" / name) for name in ("report.html", "curve.png", "curve.svg")
    ]
    assert all(Path(path).stat().st_size > 1000 for path in said)
    assert run(["report", "tiny-s3-0", "--out", str(scalerl_home / "mine.html")]) == 0
    assert {p.name for p in scalerl_home.glob("mine*")} == {"mine.html", "mine-curve.png", "mine-curve.svg"}


def test_command_refuses_in_one_line(warehouse: Path, scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flows.cli import run

    shutil.copytree(warehouse, scalerl_home / "warehouse")
    assert run(["report", "nope"]) == 2
    assert run(["report", made.RUN, "--out", str(scalerl_home)]) == 2
    said = capsys.readouterr()
    assert len(said.err.strip().splitlines()) == 2 and "nope" in said.err and "name a file" in said.err
    assert not (scalerl_home / "runs").exists()


def test_command_help_shows_defaults_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    from flows.cli import run

    assert run(["report", "--help"]) == 0
    said = capsys.readouterr().out
    assert "newest run" in said and "runs/<run>/report.html" in said and "Example: scalerl report" in said


# A real browser

LOOK = """
<script>
const boxes = (svg) => [...svg.querySelectorAll("text")].map((t) => [t.getBoundingClientRect(), t.textContent]).filter(([b]) => b.width > 0);
const clashes = [];
const look = (where) => {
  for (const svg of document.querySelectorAll("svg.chart")) {
    const all = boxes(svg);
    for (let i = 0; i < all.length; i++) for (let j = 0; j < i; j++) {
      const [a, s] = all[i], [b, t] = all[j];
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3) clashes.push(`${where}: ${s} | ${t}`);
    }
  }
};
for (const name of ["axis-compute", "axis-tokens", "axis-flops", "axis-steps"]) for (const scale of ["scale-linear", "scale-log"]) {
  document.getElementById(name).checked = true; document.getElementById(scale).checked = true;
  look(`${name} ${scale}`);
}
const shown = [...document.querySelectorAll("svg.hero")].filter((s) => s.getBoundingClientRect().width > 0).length;
const chart = document.querySelector(".panel svg[data-hover]"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true }));
document.body.dataset.seen = JSON.stringify({ clashes, shown, overflow: document.documentElement.scrollWidth - innerWidth,
  smallest: Math.min(...[...document.querySelectorAll("svg text")].filter((t) => t.getBoundingClientRect().width > 0).map((t) => t.getBoundingClientRect().height)),
  tip: document.getElementById("tip").textContent });
</script>
"""


def browse(path: Path, folder: Path, width: int = 1200) -> tuple[str, list[str], list[str]]:
    """Load a page in Chromium; returns the document, console lines, and every http(s) request that the page caused.

    What the browser asks for by itself has no initiator in its log and, by the resolver rule, reaches nobody.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine; apt-get install chromium")
    log = folder / "net.json"
    options = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
        "--disable-sync --disable-default-apps --enable-logging=stderr --v=0 --virtual-time-budget=3000 --dump-dom"
    )
    own = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", f"--window-size={width},2000"]
    command = [
        chromium,
        *options.split(),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        *own,
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console, sorted(requests_of_page(log))


def requests_of_page(log: Path) -> set[str]:
    """The http(s) addresses in Chromium's network log that a document asked for; the log may lack its end."""
    found = set()
    for line in log.read_text(errors="replace").splitlines():
        if '"initiator":' in line and '"url":"http' in line:
            params = json.JSONDecoder().raw_decode(line)[0]["params"]
            if params["initiator"] != "not an origin":
                found.add(params["url"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 600])
def test_browser_shows_the_page_without_errors_requests_or_overlaps(page: str, tmp_path: Path, width: int) -> None:
    plain = tmp_path / "report.html"
    plain.write_text(page, encoding="utf-8")
    dom, console, requests = browse(plain, tmp_path / "one", width)
    assert console == [] and requests == []
    assert made.RUN in dom and "Sample traces" in dom
    # The same page with an observer in it, for which its policy must go.
    looked = tmp_path / "looked.html"
    looked.write_text(
        re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", LOOK + "</body>"),
        encoding="utf-8",
    )
    dom, console, _ = browse(looked, tmp_path / "two", width)
    seen = json.loads(Page(dom).elements[[tag for tag, _ in Page(dom).elements].index("body")][1]["data-seen"])
    assert console == [] and seen["clashes"] == [] and seen["overflow"] <= 0 and seen["shown"] == 1
    assert seen["smallest"] >= 10 and re.match(r"step \d+: ", seen["tip"])


@pytest.mark.slow
def test_browser_policy_stops_foreign_scripts_and_requests(page: str, tmp_path: Path) -> None:
    """The observer can fail: what the page must not do is seen when it is done, and the page's own policy forbids it."""
    bad = '<script>console.error("foreign")</script><img src="http://127.0.0.1:48765/x.png">'
    with_policy, without = tmp_path / "with.html", tmp_path / "without.html"
    with_policy.write_text(page.replace("</body>", bad + "</body>"), encoding="utf-8")
    without.write_text(
        re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", bad + "</body>"),
        encoding="utf-8",
    )
    _, console, requests = browse(without, tmp_path / "one")
    assert any("foreign" in line for line in console) and "http://127.0.0.1:48765/x.png" in requests
    _, console, requests = browse(with_policy, tmp_path / "two")
    assert (
        requests == []
        and not any('"foreign"' in line for line in console)
        and any("Content Security Policy" in line for line in console)
    )
