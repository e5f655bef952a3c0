"""Watches the share of truncated traces over the last steps: 10 to 15% of a batch mark a run about to destabilise (section 4 of the paper).

Told once when the share rises above the limit, and again only after it has been at or below it in between.
"""

from collections import deque
from typing import Any

from scalerl import recipe as recipes


class TruncationWatch:
    """Truncated traces and traces of the last `truncation_window` steps."""

    def __init__(self, settings: recipes.Training) -> None:
        self.settings = settings
        self.above = False
        self._steps: deque[tuple[int, int]] = deque(maxlen=settings.truncation_window)

    @property
    def share(self) -> float:
        """Truncated traces over traces in the window; 0 before the first step."""
        traces = sum(count for _, count in self._steps)
        return sum(truncated for truncated, _ in self._steps) / traces if traces else 0.0

    def add(self, truncated: int, traces: int) -> str | None:
        """Take one step; return what to tell when a whole window is above the limit and the one before was not, else None."""
        self._steps.append((truncated, traces))
        above = len(self._steps) == self.settings.truncation_window and self.share > self.settings.truncation_limit
        risen = above and not self.above
        self.above = above
        if not risen:
            return None
        return (
            f"{self.share:.1%} of the traces of the last {self.settings.truncation_window} steps were truncated "
            f"(limit {self.settings.truncation_limit:.0%})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as JSON-able values."""
        return {"above": self.above, "steps": [list(step) for step in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; of a longer window only the newest steps."""
        self.above = state["above"]
        self._steps.extend((step[0], step[1]) for step in state["steps"])
