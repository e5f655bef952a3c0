"""An interactive page of fitted curves: one HTML file that needs no network. Points answer to the pointer; axis, bands and residuals switch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from scalerl.scaling.study import Study
from warehouse.errors import UserError
from warehouse.files import write_text


def write_page(studies: Sequence[Study], path: Path) -> Path:
    """Write the page atomically and return its path. UserError without a curve or for another ending than .html."""
    if not studies:
        raise UserError("nothing to show: no curve was read")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"cannot write {path.name}: give a file name that ends in .html")
    data = json.dumps([s.to_dict() for s in studies], allow_nan=False)
    template = files("scalerl.scaling").joinpath("page.html").read_text(encoding="utf-8")
    # "</" would end the script element that holds the data, whatever a run is called.
    return write_text(path, template.replace("/*DATA*/", data.replace("</", "<\\/")))
