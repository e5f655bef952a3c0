"""The report of a run: one self-contained HTML file, and the figure of its curve."""

from scalerl.report.material import find_run
from scalerl.report.page import write_report
from scalerl.report.plot import figure

__all__ = ["figure", "find_run", "write_report"]
