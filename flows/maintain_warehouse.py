"""The warehouse's nightly care: set damaged files aside, merge small parts, delete what merging replaced."""

from typing import Annotated, Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.parameters import Home, use_home
from scalerl import home as places
from tasks.artifacts import clean
from tasks.policy import RETRIES, RETRY_DELAYS_S, retriable

Repair = Annotated[bool, Field(description="Set damaged files aside, each with an incident; off only reports them.")]
Grace = Annotated[float, Field(description="Hours for which replaced files stay, longer than any query takes.", ge=0.1)]


@flow(name="maintain-warehouse")
def maintain_warehouse(repair: Repair = False, grace_hours: Grace = 1.0, home: Home = "") -> dict[str, int]:
    """Check every file, merge small parts, delete replaced ones.

    Args:
        repair: Set damaged files aside, each with an incident; off only reports them.
        grace_hours: Hours for which replaced files stay, longer than any query takes.
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
    """
    use_home(home)
    return check_files(repair) | merge_parts() | delete_replaced(grace_hours)


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def check_files(repair: bool) -> dict[str, int]:
    """Read every file in full and show what is wrong."""
    from warehouse.compaction import check

    found = check(places.warehouse_root(), repair=repair)
    rows: list[dict[str, Any]] = [vars(finding) for finding in found]
    create_table_artifact(clean(rows), key="warehouse-check", description=f"{len(rows)} findings in {places.warehouse_root()}")
    return {"findings": len(rows)}


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def merge_parts() -> dict[str, int]:
    """Merge the small parts of every table."""
    from warehouse.compaction import compact

    done = compact(places.warehouse_root())
    return {"parts_merged": sum(table.parts for table in done), "files_made": sum(table.files for table in done)}


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def delete_replaced(grace_hours: float) -> dict[str, int]:
    """Delete the files that merging replaced, after the grace period."""
    from warehouse.compaction import vacuum

    return {"files_deleted": vacuum(places.warehouse_root(), grace_s=grace_hours * 3600)}
