"""A night of a sweep as Prefect tasks: its plan, the record of each run's share, the leaderboard."""

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from scalerl import home
from scalerl.sweep import board, night
from scalerl.sweep.file import SweepFile
from tasks.artifacts import clean, key
from tasks.policy import RETRIES, RETRY_DELAYS_S, retriable
from tasks.progress import tell

PLAN_COLUMNS = ("rank", "arm", "seed", "decision", "from_step", "to_step", "budget", "reason")


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def claim_night(sweep: SweepFile, date: str) -> dict[str, Any]:
    """Plan the night and keep the plan, or take the one that lies there; shows the decisions as a table."""
    made = night.claim(sweep, date)
    table = [{name: getattr(share, name) for name in PLAN_COLUMNS} for share in made.tasks]
    create_table_artifact(
        clean(table),
        key=key("sweep-plan", sweep.name, date),
        description=f"{sweep.name}: decisions for the night of {date}",
    )
    for share in made.tasks:
        tell({"kind": "note", "note": f"{share.arm} seed {share.seed}: {share.decision}: {share.reason}"})
    return {"tasks": len(made.tasks), "working": sum(share.works for share in made.tasks)}


@task(retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def publish_night(name: str, date: str) -> dict[str, Any]:
    """Close the night and publish the leaderboard as an artifact and as `leaderboard.md` in the sweep's folder."""
    from warehouse.query import rows

    outcome = night.finish_night(night.load_night(name, date))
    root = home.warehouse_root()
    nights = rows(root, "select night, policy, spent, budget, state from sweeps where sweep = ? order by night", [name])
    table = board.board_rows(root, name)
    path = board.write_board(night.sweep_folder(name) / "leaderboard.md", name, table, nights)
    create_table_artifact(
        clean(table), key=key("sweep-board", name), description=f"{name}: the arms after the night of {date}"
    )
    create_markdown_artifact(path.read_text(), key=key("sweep", name), description=f"Leaderboard of {name}")
    return outcome | {"leaderboard": str(path.relative_to(home.home()))}
