"""`scalerl fit | forecast | backtest | compare | import | plan-evaluation`: curves from files of any trainer, or from the warehouse.

Nothing here needs Prefect, Ray, torch or a server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warehouse.errors import UserError

if TYPE_CHECKING:
    from scalerl.scaling.curve import Curve
    from scalerl.scaling.fit import Start
    from scalerl.scaling.forecast import Backtest
    from scalerl.scaling.study import Study
    from scalerl.scaling.window import Cutoff

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SOURCE]...",
        help="Files or folders of logs, or runs of the warehouse; default: the newest run.",
        show_default=False,
    ),
]
Compute = Annotated[
    str | None, typer.Option("--compute", metavar="COLUMN", help="Column of the compute; default: found by name.")
]
Reward = Annotated[
    str | None, typer.Option("--reward", metavar="COLUMN", help="Column of the pass rate; default: found by name.")
]
Run = Annotated[
    str | None, typer.Option("--run", metavar="COLUMN", help="Column that tells runs apart; default: found by name.")
]
Axis = Annotated[
    str | None,
    typer.Option("--axis", metavar="AXIS", help="compute, tokens, flops or steps; default: the first that is there."),
]
Task = Annotated[
    str, typer.Option("--task", metavar="NAME", help="One task of a mixture; all: every held-out prompt (runs only).")
]
Unit = Annotated[str | None, typer.Option("--unit", metavar="TEXT", help="Unit of the axis, for display.")]
Devices = Annotated[
    float | None,
    typer.Option("--devices", metavar="N", help="Devices held, to turn a column of seconds into device-hours."),
]
Format = Annotated[
    str, typer.Option("--format", metavar="NAME", help="auto, table, wandb, tensorboard, mlflow or verl.")
]
Prompts = Annotated[
    int | None, typer.Option("--prompts", metavar="N", help="Prompts of one evaluation (sampling noise).")
]
Samples = Annotated[int | None, typer.Option("--samples", metavar="N", help="Samples per prompt.")]
Range = Annotated[
    tuple[float, float] | None,
    typer.Option(
        "--reward-range",
        metavar="LOW HIGH",
        help="Range of the reward where it is no pass rate, for example -1 1.",
        show_default=False,
    ),
]
R0 = Annotated[
    str | None,
    typer.Option(
        "--r0", metavar="VALUE", help="A number, measured or fitted; default: measured at zero compute, else fitted."
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="START",
        help="Where the fit starts: a number in the axis' unit, epoch (the second one), auto (stability), none.",
    ),
]
To = Annotated[float | None, typer.Option("--to", metavar="END", help="Where the fit ends.")]
Confidence = Annotated[float, typer.Option("--confidence", min=0.5, max=0.999, help="Confidence of every interval.")]
Spread = Annotated[
    float, typer.Option("--spread", min=0.0, help="Half-width of A between runs of a recipe, for recipe intervals.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the bootstrap.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Figure = Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw to FILE (.png or .svg).")]
At = Annotated[
    list[float] | None,
    typer.Option("--at", metavar="COMPUTE", help="Forecast the reward there; may be repeated.", show_default=False),
]
For = Annotated[
    list[float] | None,
    typer.Option("--for", metavar="REWARD", help="Forecast the compute for it; may be repeated.", show_default=False),
]

Windows = Annotated[
    bool, typer.Option("--windows", help="Show the table of fits over windows (it is always in --json).")
]
Method = Annotated[
    str, typer.Option("--method", metavar="NAME", help="refined, robust, fast or paper (the paper's grid, literally).")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write an interactive page (one file, no network).")
]
Everything = Annotated[bool, typer.Option("--all", help="Every run of the warehouse.")]
Fraction = Annotated[
    list[float] | None,
    typer.Option(
        "--fraction",
        metavar="SHARE",
        help="Share of the budget fitted; may be repeated; default: 0.1 0.25 0.5 0.75.",
        show_default=False,
    ),
]
Same = Annotated[
    list[str] | None,
    typer.Option(
        "--same", metavar="NAME=RUN,RUN", help="Runs that repeat one recipe; may be repeated.", show_default=False
    ),
]
ByRecipe = Annotated[
    bool,
    typer.Option("--by-recipe", help="Runs with the same recipe (in the warehouse, or a column) count as repeats."),
]
Margin = Annotated[
    float | None,
    typer.Option("--margin", help="Difference of A that counts as none; default: from repeats, else 0.02."),
]
Save = Annotated[bool, typer.Option("--save", help="Store the pairs in the warehouse (runs of the warehouse only).")]
Linearised = Annotated[
    Path | None, typer.Option("--linearised", metavar="FILE", help="Draw log F against log C, whose slopes are B.")
]
RecipeName = Annotated[
    str | None,
    typer.Option("--recipe", metavar="NAME", help="Recipe that all these runs repeat; default: each run's own name."),
]
AssumedA = Annotated[float | None, typer.Option("--a", help="Assumed asymptote.")]
AssumedB = Annotated[float | None, typer.Option("--b", help="Assumed exponent.")]
AssumedCMid = Annotated[float | None, typer.Option("--c-mid", help="Assumed compute at half of the gain.")]
Budget = Annotated[float | None, typer.Option("--budget", help="Compute of the planned run, in the unit of C_mid.")]
TryEvaluations = Annotated[
    list[int] | None,
    typer.Option("--evaluations", help="Evaluations over the budget to try; may be repeated.", show_default=False),
]
Tolerance = Annotated[float, typer.Option("--tolerance", help="Wanted precision of A.")]
Target = Annotated[float, typer.Option("--target", min=0.5, max=0.999, help="Share of runs that must reach it.")]
AssumedR0 = Annotated[float | None, typer.Option("--r0", help="Assumed reward at zero compute.")]
TryPrompts = Annotated[
    list[int] | None,
    typer.Option("--prompts", help="Sizes of the holdout to try; may be repeated.", show_default=False),
]
TrySamples = Annotated[
    list[int] | None,
    typer.Option("--samples", help="Samples per prompt to try; may be repeated.", show_default=False),
]
PlanSource = Annotated[
    str | None,
    typer.Argument(metavar="[SOURCE]", help="A log or run whose fit gives the assumed curve.", show_default=False),
]
Files = Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files or folders of logs.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("fit", epilog="Example: scalerl fit curve.csv --from auto --at 1e5 --figure fit.png")(fit)
    app.command("forecast", epilog="Example: scalerl forecast curve.csv --at 50000 --for 0.6")(forecast)
    app.command("backtest", epilog="Example: scalerl backtest curve.csv --figure backtest.png")(backtest)
    app.command("compare", epilog="Example: scalerl compare a.csv b.csv --linearised slopes.png")(compare)
    app.command("import", epilog="Example: scalerl import wandb.csv --recipe my-grpo")(import_)
    app.command(
        "plan-evaluation",
        epilog="Example: scalerl plan-evaluation --a 0.61 --b 1.9 --c-mid 2500 --r0 0.4 --budget 8000",
    )(plan)


def fit(
    sources: Sources = None,
    compute: Compute = None,
    reward: Reward = None,
    run: Run = None,
    axis: Axis = None,
    task: Task = "all",
    unit: Unit = None,
    devices: Devices = None,
    format_: Format = "auto",
    prompts: Prompts = None,
    samples: Samples = None,
    reward_range: Range = None,
    r0: R0 = None,
    from_: From = None,
    to: To = None,
    method: Method = "refined",
    at: At = None,
    for_: For = None,
    confidence: Confidence = 0.9,
    spread: Spread = 0.02,
    seed: Seed = 0,
    windows: Windows = False,
    as_json: Json = False,
    figure: Figure = None,
    html: Html = None,
) -> None:
    """Fit the compute-performance curve: A, B, C_mid with intervals, or why the data do not show them."""
    choice = _choice(compute, reward, run, axis, unit, devices, prompts, samples, reward_range)
    curves, refused = _curves(sources, choice, format_, task)
    if method not in ("refined", "robust", "fast", "paper"):
        raise UserError(f"method {method!r}: choose refined, robust, fast or paper")
    studies = [
        _study(c, r0, from_, to, method=method, at=at, for_=for_, confidence=confidence, spread=spread, seed=seed, table=windows or as_json or len(curves) == 1)
        for c in curves
    ]  # fmt: skip
    written = _draw(studies, figure, html)
    if as_json:
        _print_json({"curves": [s.to_dict() for s in studies], "left_out": refused, "files": written})
        return
    from flows.scaling_tables import console, show_studies, show_study

    out = console()
    if len(studies) == 1:
        show_study(out, studies[0], windows=windows)
        for line in refused:
            out.print(f"left out: {line}", soft_wrap=True)
    else:
        show_studies(out, studies, refused)
    for path in written:
        out.print(f"wrote {path}", soft_wrap=True)


def forecast(
    sources: Sources = None,
    at: At = None,
    for_: For = None,
    compute: Compute = None,
    reward: Reward = None,
    run: Run = None,
    axis: Axis = None,
    task: Task = "all",
    unit: Unit = None,
    devices: Devices = None,
    format_: Format = "auto",
    prompts: Prompts = None,
    samples: Samples = None,
    reward_range: Range = None,
    r0: R0 = None,
    from_: From = None,
    to: To = None,
    confidence: Confidence = 0.9,
    spread: Spread = 0.02,
    seed: Seed = 0,
    as_json: Json = False,
    figure: Figure = None,
) -> None:
    """Forecast the reward at more compute, and the compute for a reward. Without --at and --for: at 2 and 10 times the last compute."""
    choice = _choice(compute, reward, run, axis, unit, devices, prompts, samples, reward_range)
    curves, refused = _curves(sources, choice, format_, task)
    studies = []
    for curve in curves:
        last = float(curve.compute[-1]) if len(curve) else 1.0
        points = at if at or for_ else [2.0 * last, 10.0 * last]
        studies.append(
            _study(
                curve, r0, from_, to, at=points, for_=for_, confidence=confidence, spread=spread, seed=seed, table=False
            )
        )
    written = _draw(studies, figure, None)
    if as_json:
        rows = [
            {"name": s.curve.name, "unit": s.curve.unit, "verdict": s.verdict, "headline": s.headline(),
             "forecasts": [f.to_dict() for f in s.forecasts], "compute_needed": [n.to_dict() for n in s.needs]}
            for s in studies
        ]  # fmt: skip
        _print_json({"curves": rows, "left_out": refused, "files": written})
        return
    from flows.scaling_tables import console, show_forecasts

    out = console()
    for s in studies:
        out.print(f"{s.curve.name}: {s.headline()}", soft_wrap=True)
    show_forecasts(out, studies)
    for line in [*(f"left out: {r}" for r in refused), *(f"wrote {p}" for p in written)]:
        out.print(line, soft_wrap=True)


def backtest(
    sources: Sources = None,
    everything: Everything = False,
    fraction: Fraction = None,
    compute: Compute = None,
    reward: Reward = None,
    run: Run = None,
    axis: Axis = None,
    task: Task = "all",
    unit: Unit = None,
    devices: Devices = None,
    format_: Format = "auto",
    prompts: Prompts = None,
    samples: Samples = None,
    reward_range: Range = None,
    r0: R0 = None,
    from_: From = None,
    confidence: Confidence = 0.9,
    seed: Seed = 0,
    as_json: Json = False,
    figure: Figure = None,
) -> None:
    """How wrong would the forecast have been? Fit the first part of the budget, compare with the rest, for one run or many."""
    choice = _choice(compute, reward, run, axis, unit, devices, prompts, samples, reward_range)
    if everything:
        from scalerl.home import warehouse_root
        from scalerl.scaling.stored import runs_of

        sources = runs_of(warehouse_root())
        if not sources:
            raise UserError("the warehouse holds no run with an evaluation; start one with: scalerl run")
    curves, refused = _curves(sources, choice, format_, task)
    found = [_backtested(curve, r0, from_, fraction, confidence=confidence, seed=seed) for curve in curves]
    written = []
    if figure is not None:
        from scalerl.scaling.plots import plot_backtest

        if len(found) != 1:
            raise UserError("--figure draws the back-test of one run; name one")
        written.append(str(plot_backtest(found[0][0], found[0][1], figure)))
    from flows.scaling_tables import console, show_backtests, summarise

    if as_json:
        runs = [
            {"name": s.curve.name, "unit": s.curve.unit, "tests": [t.to_dict() for t in tests]} for s, tests in found
        ]
        _print_json({"runs": runs, "summary": summarise(found), "left_out": refused, "files": written})
        return
    out = console()
    show_backtests(out, found)
    for line in [*(f"left out: {r}" for r in refused), *(f"wrote {p}" for p in written)]:
        out.print(line, soft_wrap=True)


def _backtested(
    curve: Curve, r0: str | None, from_: str | None, fraction: Sequence[float] | None, *, confidence: float, seed: int
) -> tuple[Study, list[Backtest]]:
    """The study of a curve and its back-tests."""
    from scalerl.scaling.forecast import backtest as run_backtest
    from scalerl.scaling.window import resolve_window

    start, _ = resolve_window(curve, _cutoff(from_), r0=_start(r0))
    shares = tuple(fraction or (0.1, 0.25, 0.5, 0.75))
    tests = run_backtest(curve, shares, r0=_start(r0), start=start, confidence=confidence, seed=seed)
    return _study(curve, r0, from_, None, confidence=confidence, seed=seed, table=False), tests


def compare(
    sources: Sources = None,
    same: Same = None,
    by_recipe: ByRecipe = False,
    margin: Margin = None,
    compute: Compute = None,
    reward: Reward = None,
    run: Run = None,
    axis: Axis = None,
    task: Task = "all",
    unit: Unit = None,
    devices: Devices = None,
    format_: Format = "auto",
    prompts: Prompts = None,
    samples: Samples = None,
    reward_range: Range = None,
    r0: R0 = None,
    from_: From = None,
    to: To = None,
    confidence: Confidence = 0.9,
    seed: Seed = 0,
    save: Save = False,
    as_json: Json = False,
    figure: Figure = None,
    linearised: Linearised = None,
) -> None:
    """Rank recipes: ceilings first, then efficiency at a shared ceiling; better, same, worse or cannot tell for every pair."""
    from scalerl.scaling.compare import compare as run_compare

    choice = _choice(compute, reward, run, axis, unit, devices, prompts, samples, reward_range)
    curves, refused = _curves(sources, choice, format_, task)
    window = (_number_start(from_), float("inf") if to is None else to)
    result = run_compare(
        _arms(curves, same, by_recipe), r0=_start(r0), window=window, margin=margin, confidence=confidence, seed=seed
    )
    written = _draw_comparison(result, curves, r0, window, figure, linearised, seed)
    if save:
        _save_comparison(result, task)
    if as_json:
        _print_json(result.to_dict() | {"left_out": refused, "files": written})
        return
    from flows.scaling_tables import console, show_comparison

    out = console()
    show_comparison(out, result)
    for line in [*(f"left out: {r}" for r in refused), *(f"wrote {p}" for p in written)]:
        out.print(line, soft_wrap=True)


def import_(
    sources: Files,
    recipe: RecipeName = None,
    compute: Compute = None,
    reward: Reward = None,
    run: Run = None,
    axis: Axis = None,
    unit: Unit = None,
    devices: Devices = None,
    format_: Format = "auto",
    prompts: Prompts = None,
    samples: Samples = None,
    reward_range: Range = None,
    r0: R0 = None,
    from_: From = None,
    as_json: Json = False,
) -> None:
    """Put the runs of other trainers into the warehouse, where leaderboard, SQL and compare see them. Importing twice adds nothing."""
    from scalerl.home import warehouse_root
    from scalerl.scaling.importers.columns import read_curves
    from scalerl.scaling.stored import import_curve

    choice = _choice(compute, reward, run, axis, unit, devices, prompts, samples, reward_range)
    refused: list[str] = []
    done = []
    for source in sources:
        for curve in read_curves([Path(source)], choice, format_, refused):  # type: ignore[arg-type]
            options: dict[str, Any] = {"r0": _start(r0), "start": _cutoff(from_)}
            done.append(import_curve(warehouse_root(), curve, source=Path(source).name, recipe=recipe, **options))
    if as_json:
        runs = [
            {"run_id": d.run_id, "existed": d.existed, "points": len(d.study.curve), "headline": d.study.headline()}
            for d in done
        ]
        _print_json({"runs": runs, "left_out": refused})
        return
    for d in done:
        typer.echo(
            f"{d.run_id}: {'already there' if d.existed else f'{len(d.study.curve)} evaluations imported'}; {d.study.headline()}"
        )
    for line in refused:
        typer.echo(f"left out: {line}")


def plan(
    source: PlanSource = None,
    a: AssumedA = None,
    b: AssumedB = None,
    c_mid: AssumedCMid = None,
    r0: AssumedR0 = None,
    budget: Budget = None,
    prompts: TryPrompts = None,
    samples: TrySamples = None,
    evaluations: TryEvaluations = None,
    tolerance: Tolerance = 0.02,
    target: Target = 0.9,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """How many prompts, samples and evaluations it takes to know A within the tolerance at a budget, by simulation."""
    from scalerl.scaling.plan_evaluation import plan_evaluation

    if source is not None:
        curves, _ = _curves([source], _choice(), "auto")
        fitted = _study(curves[0], None if r0 is None else str(r0), None, None, table=False).fit
        if not fitted.identified and None in (a, b, c_mid):
            raise UserError(
                f"{source}: {fitted.verdict} ({fitted.reason}); give the assumed curve with --a, --b, --c-mid and --r0"
            )
        a, b, c_mid, r0 = (given if given is not None else own for given, own in zip((a, b, c_mid, r0), (fitted.a, fitted.b, fitted.c_mid, fitted.r0), strict=True))  # fmt: skip
    if a is None or b is None or c_mid is None or r0 is None or budget is None:
        raise UserError("give --a, --b, --c-mid, --r0 and --budget, or a SOURCE and --budget")
    made = plan_evaluation(
        a=a, b=b, c_mid=c_mid, r0=r0, budget=budget, prompts=prompts or (250, 500, 1000, 2000), samples=samples or (1, 4, 16),
        evaluations=evaluations or (10, 20, 40, 80), tolerance=tolerance, target=target, seed=seed,
    )  # fmt: skip
    if as_json:
        _print_json(made.to_dict())
        return
    from flows.scaling_tables import console, show_plan

    show_plan(console(), made, tolerance)


# --- shared by the commands -------------------------------------------------------------------------------------------


def _choice(
    compute: str | None = None,
    reward: str | None = None,
    run: str | None = None,
    axis: str | None = None,
    unit: str | None = None,
    devices: float | None = None,
    prompts: int | None = None,
    samples: int | None = None,
    reward_range: tuple[float, float] | None = None,
) -> Any:
    from scalerl.scaling.importers.columns import Choice

    return Choice(compute, reward, run, axis, unit, devices, prompts, samples, reward_range)


def _curves(sources: Sequence[str] | None, choice: Any, form: str, task: str = "all") -> tuple[list[Curve], list[str]]:
    """Curves of files that exist, and of runs of the warehouse; what could not be read of several runs is described."""
    refused: list[str] = []
    files = [Path(s) for s in sources or () if Path(s).exists()]
    names = [s for s in sources or () if not Path(s).exists()]
    for name in names:
        if Path(name).suffix or "/" in name:
            raise UserError(f"{name}: no such file or folder")
    if files and task != "all":
        raise UserError(f"--task {task} picks a task of a run of the warehouse; {files[0]} is a file")
    curves: list[Curve] = []
    if files:
        from scalerl.scaling.importers.columns import read_curves

        if form not in ("auto", "table", "wandb", "tensorboard", "mlflow", "verl"):
            raise UserError(f"format {form!r}: choose auto, table, wandb, tensorboard, mlflow or verl")
        curves += read_curves(files, choice, form, refused)  # type: ignore[arg-type]
    if names or not files:
        from scalerl.home import warehouse_root
        from scalerl.report.material import find_run
        from scalerl.scaling.stored import stored_curve

        root = warehouse_root()
        wanted: list[str | None] = [*names] or [None]
        curves += [stored_curve(root, find_run(root, name), choice.axis or "compute", task=task) for name in wanted]
    return curves, refused


def _start(r0: str | None) -> Start:
    if r0 is None or r0 in ("measured", "fitted"):
        return r0  # type: ignore[return-value]
    try:
        value = float(r0)
    except ValueError as error:
        raise UserError(f"--r0 {r0!r}: give a number, measured or fitted") from error
    if not 0.0 <= value < 1.0:
        raise UserError(f"--r0 {r0}: R_0 is a share from 0 to below 1 (40% is 0.4)")
    return value


def _cutoff(start: str | None) -> Cutoff | None:
    if start is None or start in ("none", "epoch", "auto"):
        return start  # type: ignore[return-value]
    try:
        return float(start)
    except ValueError as error:
        raise UserError(f"--from {start!r}: give a number, epoch, auto or none") from error


def _number_start(start: str | None) -> float:
    cut = _cutoff(start)
    if cut is None or cut == "none":
        return 0.0
    if isinstance(cut, str):
        raise UserError(f"--from {cut}: a comparison needs one start for all runs; give a number")
    return cut


def _study(
    curve: Curve, r0: str | None, start: str | None, end: float | None, *, at: Sequence[float] | None = None, for_: Sequence[float] | None = None, **options: Any
) -> Study:  # fmt: skip
    from scalerl.scaling.study import study

    return study(
        curve, r0=_start(r0), start=_cutoff(start), end=end, forecast_at=at or (), rewards=for_ or (), **options
    )


def _draw(studies: Sequence[Study], figure: Path | None, html: Path | None) -> list[str]:
    written = []
    if figure is not None:
        from scalerl.scaling.plots import plot_comparison, plot_study

        drawn = plot_study(studies[0], figure) if len(studies) == 1 else plot_comparison(studies, figure)
        written.append(str(drawn))
    if html is not None:
        from scalerl.scaling.page import write_page

        written.append(str(write_page(studies, html)))
    return written


def _arms(curves: Sequence[Curve], same: Sequence[str] | None, by_recipe: bool) -> dict[str, list[Curve]]:
    by_name = {c.name: c for c in curves}
    groups: dict[str, list[Curve]] = {}
    for text in same or ():
        name, _, members = text.partition("=")
        wanted = [m.strip() for m in members.split(",") if m.strip()]
        missing = [m for m in wanted if m not in by_name]
        if not wanted or missing:
            raise UserError(f"--same {text!r}: expected NAME=RUN,RUN with runs among {', '.join(by_name)}")
        groups[name] = [by_name.pop(m) for m in wanted]
    if by_recipe:
        unnamed = [name for name, curve in by_name.items() if curve.recipe is None]
        recipes: dict[str, str] = {}
        if unnamed:
            from scalerl.home import warehouse_root
            from scalerl.scaling.stored import recipes_of

            recipes = recipes_of(warehouse_root(), unnamed)
        for name, curve in by_name.items():
            groups.setdefault(curve.recipe or recipes[name], []).append(curve)
        return groups
    return groups | {name: [curve] for name, curve in by_name.items()}


def _draw_comparison(
    result: Any, curves: Sequence[Curve], r0: str | None, window: tuple[float, float], figure: Path | None, linearised: Path | None, seed: int
) -> list[str]:  # fmt: skip
    written = []
    if figure is not None:
        from scalerl.scaling.plots import plot_comparison
        from scalerl.scaling.study import study

        studies = [study(c, r0=_start(r0), window=window, seed=seed, table=False) for c in curves]
        written.append(str(plot_comparison(studies, figure)))
    if linearised is not None:
        from scalerl.scaling.fit import refit_at
        from scalerl.scaling.plots import plot_linearised

        items = [(a.curves[0], a.fit) for a in result.arms]
        known = [a.a for a in result.arms if a.identified]
        shared = None
        if len(known) == len(items) and max(known) - min(known) <= result.margin:
            shared = sum(known) / len(known)
            items = [(c, refit_at(c, f, shared)) for c, f in items]
        written.append(str(plot_linearised(items, linearised, shared_a=shared)))
    return written


def _save_comparison(result: Any, task: str) -> None:
    from scalerl.home import warehouse_root
    from warehouse.query import rows
    from warehouse.writer import append

    root = warehouse_root()
    steps = {
        str(r["run_id"]): int(r["step"])
        for r in rows(root, "select run_id, max(step) as step from evaluations group by run_id")
    }
    strangers = [a.name for a in result.arms if a.name not in steps or len(a.fits) > 1]
    if strangers:
        raise UserError(
            f"--save stores pairs of single runs of the warehouse; not among them: {', '.join(strangers)}; import files first"
        )
    for run_id, row in result.rows(steps):
        append(root, "comparisons", run_id, [row | {"task": task}])


def _print_json(record: dict[str, Any]) -> None:
    typer.echo(json.dumps(record, allow_nan=False))
