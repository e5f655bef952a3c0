"""Checkpoints of the Hugging Face hub: from the local cache, or downloaded once, always at a pinned commit. (Files of data sets: `scalerl.data.hub`.)

What is named by a commit never changes, so a name with its commit is an identity. A cached copy is taken without any network; without one, HF_HUB_OFFLINE or a network
that cannot be reached gives one line that says what to do.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl.data import hub as data_hub
from warehouse.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a causal checkpoint consists of; weights in other formats are left out.
_CHECKPOINT = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_SECONDS = 20


def is_name(text: str) -> bool:
    """Say whether a text has the form of a hub name, owner/name, and is no folder here."""
    return _NAME.fullmatch(text) is not None and not Path(text).expanduser().exists()


def checkpoint(name: str, revision: str, knob: str = "model.path") -> Path:
    """Return the folder of a checkpoint of the hub. Raises UserError without a revision, or where it is neither cached nor reachable."""
    if not revision:
        raise UserError(
            f"{knob} = {name!r} is no folder here; for the hub, pin the commit: model.revision = 40 hex digits "
            "(the page of the model lists them under Files, History)"
        )
    from huggingface_hub import snapshot_download

    def get(local: bool) -> str:
        return str(
            snapshot_download(
                name, revision=revision, allow_patterns=_CHECKPOINT, local_files_only=local, etag_timeout=_SECONDS
            )
        )

    folder = Path(_cached_or_fetched(get, f"{knob} = {name!r}", f"hf download {name} --revision {revision}"))
    if not (folder / "config.json").is_file():
        raise UserError(f"{knob} = {name!r}: the commit {revision[:8]} holds no config.json; is it a checkpoint?")
    return folder


def config_file(name: str, revision: str = "") -> Path:
    """Return the config.json of a checkpoint of the hub, without its weights: from the cache, or fetched; without a commit that of the branch `main`.

    Raises UserError where it is neither cached nor reachable, or the hub has no such checkpoint.
    """
    from huggingface_hub import hf_hub_download

    def get(local: bool) -> str:
        return str(
            hf_hub_download(
                name, "config.json", revision=revision or None, local_files_only=local, etag_timeout=_SECONDS
            )
        )

    command = f"hf download {name} config.json" + (f" --revision {revision}" if revision else "")
    return Path(_cached_or_fetched(get, f"model {name!r}" + (f" at {revision[:8]}" if revision else ""), command))


def data_file(place: str, knob: str) -> Path:
    """Return a file: a path as it is, or `hub://OWNER/NAME@COMMIT/FILE` of a data set of the hub. Raises UserError, naming the knob."""
    if data_hub.is_address(place):
        return data_hub.fetch(place)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{knob}: no file {path}; name a file, or hub://OWNER/NAME@COMMIT/FILE")
    return path


def _cached_or_fetched(get: Callable[[bool], Any], what: str, command: str) -> str:
    """Return `get(True)`, else `get(False)`; raises UserError where the hub cannot be reached or does not have it."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return str(get(True))
    except LocalEntryNotFoundError:
        pass
    try:
        _look_up()  # the client would try again for half a minute
        return str(get(False))
    except HfHubHTTPError as error:
        raise UserError(
            f"{what}: the hub does not give it ({str(error).splitlines()[0]}); check name and commit"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.HTTPError, OSError):
        raise UserError(
            f"{what}: not in the local cache, and the hub cannot be reached; where there is a network run: {command}"
        ) from None


def _look_up() -> None:
    """Raise OSError where the hub's host has no address here; a proxy looks it up itself."""
    import os
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
