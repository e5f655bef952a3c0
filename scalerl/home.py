"""Where everything of a project lies: one folder, given by `SCALERL_HOME` (default `.scalerl` in the current folder)."""

import os
from pathlib import Path


def home() -> Path:
    """Return the absolute home folder; it is made by whoever writes to it first."""
    return Path(os.environ.get("SCALERL_HOME") or ".scalerl").expanduser().resolve()


def warehouse_root() -> Path:
    """Return the folder of the Parquet parts."""
    return home() / "warehouse"


def run_folder(run_id: str) -> Path:
    """Return the folder of one run: recipe, checkpoints, logs and records."""
    return home() / "runs" / run_id


def dataset_folder(dataset_id: str) -> Path:
    """Return the folder of one prepared data set (train.parquet, holdout.parquet, rejected.parquet, record.json)."""
    return home() / "datasets" / dataset_id


def model_folder(model_id: str) -> Path:
    """Return the folder of one starting model: an ordinary Hugging Face checkpoint plus record.json."""
    return home() / "models" / model_id
