"""`scalerl evaluate`: a stored checkpoint asked the holdout again, at other settings."""

import json
import os
from typing import Annotated, Any

import typer

from flows.cli_recipe import AsJson, Overrides


def register(app: typer.Typer) -> None:
    """Add evaluate to the command line."""
    app.command(
        epilog="Example: scalerl evaluate tiny-s0-1a2b3c4d --step 180 --samples 64 --temperature 0.7    "
        "Benchmarks: scalerl evaluate ./checkpoint --bench gsm8k=gsm8k_test.jsonl --bench aime24=aime24.parquet --limit 200"
    )(evaluate)


def evaluate(
    target: Annotated[
        str, typer.Argument(help="Name of a run (see `scalerl status`), or folder of a Hugging Face checkpoint.")
    ],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Step at which the stage ends  [default: the newest]")
    ] = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(
            "--bench",
            metavar="NAME=FILE",
            help="Ask a downstream benchmark in place of the holdout: aime24, aime25, math500, gsm8k, humaneval, mbpp, livecodebench; "
            "or the name alone of an entry of the run's recipe. May be repeated.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, help="Answers per prompt, the k of mean@k  [default: 64; 16 of benchmarks]"),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option("--temperature", help="Sampling temperature; 0 takes the likeliest token (benchmarks only)."),
    ] = 1.0,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts",
            "--limit",
            min=1,
            help="Prompts to ask, of every task of a mixture  [default: as many as training did; all of a benchmark]",
        ),
    ] = None,
    knobs: Annotated[
        list[str] | None,
        typer.Option(
            "--bench-set", metavar="KNOB=VALUE", help="Change a knob of the benchmarks, for example max_tokens=256."
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="For a folder: the recipe whose prompt form, budgets, engine and holdout are used  [default: tiny; scalerl for benchmarks]",
        ),
    ] = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint with more samples or at another temperature, or on downstream benchmarks.

    Its rows have a benchmark name of their own, so curves, fits and checks never see them; the same question a second time shows the stored answer.
    """
    from flows.local_server import prefect_api
    from scalerl import home
    from scalerl.evaluation.checkpoint import recipes_of

    recipes_of(target, recipe, overrides or (), bool(bench))  # told before Prefect starts
    os.environ["SCALERL_HOME"] = str(home.home())
    with prefect_api(home.home()):
        from flows.evaluate_checkpoint import evaluate_checkpoint

        record = evaluate_checkpoint(
            target,
            step,
            samples,
            temperature,
            prompts,
            recipe,
            benchmarks=tuple(bench or ()),
            benchmark_knobs=tuple(knobs or ()),
            overrides=tuple(overrides or ()),
        )
    if as_json:
        typer.echo(json.dumps(record))
        return
    if "benchmarks" in record:
        _show_benchmarks(record)
        return
    typer.echo(f"{record['run_id']} at step {record['step']}, benchmark {record['benchmark']}")
    for row in record["tasks"]:
        typer.echo(
            f"  {row['task']:<12} pass rate {row['pass_rate']:.4f} +- {row['stderr']:.4f}   "
            f"{row['prompts']} prompts x {row['samples']}, truncated {row['truncated_share']:.1%}"
        )


def _show_benchmarks(record: dict[str, Any]) -> None:
    typer.echo(f"{record['run_id']} at step {record['step']}")
    for row in record["benchmarks"]:
        typer.echo(
            f"  {row['name']:<14} mean@{row['samples']} {row['pass_rate']:.4f} +- {row['stderr']:.4f}   "
            f"{row['prompts']} prompts, truncated {row['truncated_share']:.1%}, unverifiable {row['unverifiable']}"
        )
        better = [
            f"pass@{k} {rate:.4f} +- {row['pass_at_k_stderr'][k]:.4f}"
            for k, rate in row["pass_at_k"].items()
            if k != "1"
        ]
        if better:
            typer.echo(f"  {'':<14} {'   '.join(better)}")
        for reason, count in row["skipped"].items():
            typer.echo(f"  {'':<14} {count} problems left out: {reason}")
