"""The figure of a run: the curve that the report shows, as a picture for papers and READMEs."""

from pathlib import Path

from scalerl.report.curves import views
from scalerl.report.material import gather


def figure(root: Path, run_id: str, out: Path) -> Path | None:
    """Write the run's curve as `out` (.png) and as .svg beside it; return the path of the PNG, None for a run without a curve yet.

    Drawn by `scalerl.scaling.plots`, in the manner of figure 1 of the paper. The same warehouse gives the same bytes. Raises UserError for an
    unknown run.
    """
    curves = views(gather(root, run_id), first_only=True)
    if not curves:
        return None
    from scalerl.scaling.plots import plot_study

    study = curves[0].study
    plot_study(study, out.with_suffix(".svg"))
    return plot_study(study, out.with_suffix(".png"))
