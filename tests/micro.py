"""A study of seconds: real data, model, Ray, torch and warehouse, as small as it goes while the policy still gets half of its sums right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
MICRO = """\
extends = "tiny"
name = "micro"
[data]
train = 60
holdout = 12
digits = 1
[model]
layers = 1
[warm_start]
steps = 150
noisy_steps = 5
[rollout]
group_size = 8
[optimizer]
lr = 1e-3
[training]
steps = 6
stage_steps = 3
prompts_per_step = 4
mode = "deterministic"
[evaluation]
prompts = 12
samples = 2
"""


def learnt_start(recipe: Recipe, folder: Path) -> tuple[Path, Path]:
    """Prepare the recipe's data and make its starting policy in `folder`; return both folders."""
    from scalerl.data.prepare import prepare
    from scalerl.learner.warm_start import warm_start

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALERL_HOME", str(folder / "start"))
        prepare(recipe, folder / "data")
        warm_start(recipe, folder / "data", folder / "model", lambda step, steps, loss: None)
    return folder / "data", folder / "model"


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a command that works in `home` and knows no Prefect server but those named in `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"SCALERL_HOME": str(home), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def scalerl(home: Path, *arguments: str, timeout: float = 1200, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, in the folder beside the home."""
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=home.parent,
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
