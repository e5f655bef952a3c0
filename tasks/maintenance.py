"""The warehouse's care: what is damaged, what can be merged, what may go."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact

from scalerl import home
from tasks.artifacts import clean
from tasks.policy import RETRIES, RETRY_DELAYS_S, retriable


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def check_files(repair: bool) -> dict[str, int]:
    """Read every file in full and show what is wrong."""
    from warehouse.compaction import check

    found = check(home.warehouse_root(), repair=repair)
    rows: list[dict[str, Any]] = [vars(finding) for finding in found]
    create_table_artifact(
        clean(rows), key="warehouse-check", description=f"{len(rows)} findings in {home.warehouse_root()}"
    )
    return {"findings": len(rows)}


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def merge_parts() -> dict[str, int]:
    """Merge the small parts of every table."""
    from warehouse.compaction import compact

    done = compact(home.warehouse_root())
    return {"parts_merged": sum(table.parts for table in done), "files_made": sum(table.files for table in done)}


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def delete_replaced(grace_hours: float) -> dict[str, int]:
    """Delete the files that merging replaced, after the grace period."""
    from warehouse.compaction import vacuum

    return {"files_deleted": vacuum(home.warehouse_root(), grace_s=grace_hours * 3600)}


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def take_queued_rows() -> dict[str, int]:
    """Move rows that waited for a disk with room from the runs' folders into the warehouse."""
    from warehouse.spool import drain

    queues = sorted((home.home() / "runs").glob("*/queue"))
    return {"parts_from_queues": sum(drain(queue, home.warehouse_root()) for queue in queues)}
