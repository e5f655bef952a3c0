"""The run's report: one HTML file and the figure of its curve."""

from pathlib import Path
from typing import Any

from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import Step, finish, finished
from tasks.policy import step_task


@step_task
def write(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Write `report.html` and `curve.png` into the run's folder, from the warehouse alone."""
    from scalerl.report import figure, write_report

    done = finished(step)
    if done is not None:
        return done
    root, folder = home.warehouse_root(), home.run_folder(recipe.run_id)
    paths: dict[str, Path] = {"report": write_report(root, recipe.run_id, folder / "report.html")}
    drawn = figure(root, recipe.run_id, folder / "curve.png")
    if drawn:
        paths["figure"] = drawn
    return finish(
        step, list(paths.values()), {name: str(path.relative_to(home.home())) for name, path in paths.items()}
    )
