"""The warehouse's nightly care: set damaged files aside, merge small parts, delete what merging replaced."""

from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.parameters import Home, use_home
from tasks.maintenance import check_files, delete_replaced, merge_parts, take_queued_rows
from tasks.notification import notify

Repair = Annotated[bool, Field(description="Set damaged files aside, each with an incident; off only reports them.")]
Grace = Annotated[float, Field(description="Hours for which replaced files stay, longer than any query takes.", ge=0.1)]


@flow(name="maintain-warehouse", on_failure=[notify], on_crashed=[notify])
def maintain_warehouse(repair: Repair = False, grace_hours: Grace = 1.0, home: Home = "") -> dict[str, int]:
    """Check every file, merge small parts, delete replaced ones.

    Args:
        repair: Set damaged files aside, each with an incident; off only reports them.
        grace_hours: Hours for which replaced files stay, longer than any query takes.
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
    """
    use_home(home)
    return take_queued_rows() | check_files(repair) | merge_parts() | delete_replaced(grace_hours)
