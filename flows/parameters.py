"""Types of the flows' parameters: the Prefect UI makes a form of them and refuses a bad value at submit."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

RecipeName = Annotated[
    str,
    Field(
        description="Shipped recipe (tiny, scalerl, ...) or the path of a .toml file.",
        pattern=r"^([a-z0-9][a-z0-9._-]*|.+\.toml)$",
    ),
]
Override = Annotated[str, Field(pattern=r"^[a-z_]+(\.[a-z0-9_]+)*=.+$")]
Overrides = Annotated[tuple[Override, ...], Field(description="Knobs to change, each as section.knob=value.")]
Seed = Annotated[
    int | None, Field(description="Seed of every random choice; empty keeps the recipe's own.", ge=0, lt=2**31)
]
ForkOf = Annotated[
    str,
    Field(description="Run to fork in place of a recipe; empty for none.", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$"),
]
AtStep = Annotated[int | None, Field(description="Step of the checkpoint to fork; empty takes the newest one.", ge=1)]
Home = Annotated[str, Field(description="Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.")]


def use_home(home: str) -> None:
    """Make `home` the home folder of this process; empty leaves it as the environment says."""
    if home:
        os.environ["SCALERL_HOME"] = str(Path(home).expanduser().resolve())
