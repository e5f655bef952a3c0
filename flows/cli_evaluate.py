"""`scalerl evaluate`: a stored checkpoint asked the holdout again, at other settings."""

import json
import os
from typing import Annotated

import typer

from flows.cli_recipe import AsJson


def register(app: typer.Typer) -> None:
    """Add evaluate to the command line."""
    app.command(epilog="Example: scalerl evaluate tiny-s0-1a2b3c4d --step 180 --samples 64 --temperature 0.7")(evaluate)


def evaluate(
    target: Annotated[
        str, typer.Argument(help="Name of a run (see `scalerl status`), or folder of a Hugging Face checkpoint.")
    ],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Step at which the stage ends  [default: the newest]")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers per prompt, the k of mean@k.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature.")] = 1.0,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Prompts to ask  [default: as many as training did]")
    ] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", help="For a folder: the recipe whose holdout and prompt form are used.")
    ] = "tiny",
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint with more samples or at another temperature.

    Its rows have a benchmark name of their own, so curves, fits and checks never see them; the same settings a second time show the stored answer.
    """
    from flows.local_server import prefect_api
    from scalerl import home

    os.environ["SCALERL_HOME"] = str(home.home())
    with prefect_api(home.home()):
        from flows.evaluate_checkpoint import evaluate_checkpoint

        record = evaluate_checkpoint(target, step, samples, temperature, prompts, recipe)
    if as_json:
        typer.echo(json.dumps(record))
        return
    typer.echo(f"{record['run_id']} at step {record['step']}, benchmark {record['benchmark']}")
    for row in record["tasks"]:
        typer.echo(
            f"  {row['task']:<12} pass rate {row['pass_rate']:.4f} +- {row['stderr']:.4f}   "
            f"{row['prompts']} prompts x {row['samples']}, truncated {row['truncated_share']:.1%}"
        )
