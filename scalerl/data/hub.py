"""Files of a dataset hub, named by an address and fetched once into the home folder.

    hub://POLARIS-Project/Polaris-Dataset-53K@<commit>/polaris-data-53K.jsonl
    hub://OWNER/NAME@<commit>/FILE#sha256=<hex>         (or #md5=<hex>)

The commit is required, so an address names one content for ever. What arrives is compared with the checksum that the hub keeps (SHA-256 of large files, git's
SHA-1 of small ones) and with the address's own; only then it gets its name. A transfer that breaks goes on where it stopped, in the same call or in the next one.
With HF_HUB_OFFLINE=1 only files that are there already are used. HF_ENDPOINT names another hub.
"""

import fcntl
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scalerl import home
from warehouse import files
from warehouse.errors import UserError

SCHEME = "hub://"
_ADDRESS = re.compile(
    r"hub://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/#]+))?/(?P<file>[^#]+?)(?:#(?P<kind>sha256|md5)=(?P<digest>[0-9a-fA-F]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds without a byte, and transfers in a row that bring nothing, after which the hub counts as lost.
_SILENCE_S, _TRIES = 30.0, 4
_LENGTHS = {"sha256": 64, "md5": 32}
_FORM = "write it as hub://OWNER/NAME@COMMIT/FILE, with #sha256=... or #md5=... at the end if you like"


@dataclass(frozen=True)
class Address:
    """A file of a dataset repository at a commit (40 hex digits), and the checksum that it must have (kind "" for none of its own)."""

    repo: str
    revision: str
    file: str
    kind: str = ""
    digest: str = ""

    @property
    def path(self) -> Path:
        """Return where the file lies once it is here."""
        return home.home() / "hub" / self.repo.replace("/", "--") / self.revision / self.file


def is_address(path: str) -> bool:
    """Say whether a path names a file of the hub."""
    return path.startswith("hub:")


def parse(text: str) -> Address:
    """Read an address; raises UserError for one that names no commit or has another form."""
    match = _ADDRESS.fullmatch(text)
    if match is None or ".." in match["file"].split("/"):
        raise UserError(f"data: {text} is no address of a dataset file; {_FORM}")
    revision, kind = match["revision"] or "", match["kind"] or ""
    if not _COMMIT.fullmatch(revision):
        named = f"the revision {revision!r} may move" if revision else "no revision is named"
        raise UserError(f"data: {text}: {named}; name the commit, 40 hex digits that the repository's history shows")
    if kind and len(match["digest"]) != _LENGTHS[kind]:
        raise UserError(f"data: {text}: a {kind} has {_LENGTHS[kind]} hex digits, this one {len(match['digest'])}")
    return Address(match["repo"], revision, match["file"], kind, (match["digest"] or "").lower())


def fetch(text: str) -> Path:
    """Return the local path of a hub file, fetched if it is not here yet.

    Raises UserError for a malformed address, a file that the hub does not have, a hub that does not answer, offline mode without the file, or a wrong checksum.
    """
    address = parse(text)
    if not address.path.is_file() and (shared := _shared_copy(address)) and not address.kind:
        return shared
    if not address.path.is_file():
        address.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(address.path):
            if not address.path.is_file():
                _download(address, text)
    if address.kind and (found := _digest(address.path, address.kind)) != address.digest:
        raise UserError(
            f"data: {text}: the file has the {address.kind} {found}; mend the address, or remove {address.path} to fetch it again"
        )
    return address.path


def _shared_copy(address: Address) -> Path | None:
    """Return the file in the cache that huggingface_hub shares between programs, where it is there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(address.repo, address.file, revision=address.revision, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def _download(address: Address, text: str) -> None:
    """Fetch into a `.part` file named by the content that the hub announces, check it, and give it its name."""
    import httpx2
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    if is_offline_mode():
        raise UserError(
            f"data: {text}: HF_HUB_OFFLINE is set and the file is not in {address.path.parent}; unset it once"
        )
    try:
        url, etag, size = _metadata(address)
        part = address.path.with_name(f"{address.path.name}.{etag[:16]}.part")
        _transfer(url, part, size)
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        raise UserError(
            f"data: {text} cannot be fetched ({_one_line(error)}); repeat the command to go on where it stopped, or name a local file"
        ) from None
    _verify(part, etag, address, text)
    with part.open("rb") as handle:
        os.fsync(handle.fileno())
    part.replace(address.path)
    files.sync_folder(address.path.parent)


def _metadata(address: Address) -> tuple[str, str, int | None]:
    """Ask the hub for the place, the checksum and the size of a file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT") or None
    url = hf_hub_url(address.repo, address.file, repo_type="dataset", revision=address.revision, endpoint=endpoint)
    found = get_hf_file_metadata(url, endpoint=endpoint)
    if not found.etag:
        raise OSError("the hub names no checksum")
    if found.commit_hash and found.commit_hash != address.revision:
        raise OSError(f"the hub answers with the commit {found.commit_hash}")
    return found.location, found.etag, found.size


def _transfer(url: str, part: Path, size: int | None) -> None:
    """Append to the part what it lacks; broken connections are taken up again by byte ranges, until several in a row bring nothing.

    Bytes are written as they come, so that a transfer that is killed keeps them. Raises OSError where the hub refuses or falls silent.
    """
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        if size is not None and before > size:
            part.unlink()
            before = 0
        if before == size:
            return
        broken = _append(url, part, before)
        have = part.stat().st_size if part.exists() else 0
        if have == size or (size is None and not broken):
            return
        idle = 0 if have > before else idle + 1
        if idle == _TRIES:
            raise OSError(
                f"the line breaks after {have} bytes of {size or 'an unknown number'}: {broken or 'no more came'}"
            )
        time.sleep(min(2**idle, 8) / 2)


def _append(url: str, part: Path, begin: int) -> str:
    """Append what the hub sends from byte `begin` on; return how the line broke, or ""."""
    from huggingface_hub.utils import build_hf_headers

    own = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    # The token, where there is one, is for the hub alone and not for the storage that it points to.
    headers: dict[str, str] = build_hf_headers(token=None if url.startswith(own) else False)
    request = urllib.request.Request(url, headers=headers | ({"Range": f"bytes={begin}-"} if begin else {}))
    try:
        answer = urllib.request.urlopen(request, timeout=_SILENCE_S)
        # A hub that knows no ranges sends everything anew.
        with answer, part.open("ab" if answer.status == 206 else "wb") as handle:
            while block := answer.read1(1 << 16):
                handle.write(block)
    except urllib.error.HTTPError as error:
        if error.code < 500 and error.code not in (408, 429):
            raise
        return str(error)
    except (OSError, http.client.HTTPException) as error:
        return _one_line(error)
    return ""


def _verify(part: Path, etag: str, address: Address, text: str) -> None:
    """Compare with the hub's checksum and the address's own; a wrong part is removed."""
    wanted = [(address.kind, address.digest)] if address.kind else []
    if re.fullmatch("[0-9a-f]{64}", etag):
        wanted.append(("sha256", etag))
    elif _COMMIT.fullmatch(etag):
        wanted.append(("git", etag))
    for kind, digest in wanted:
        if (found := _digest(part, kind)) != digest:
            part.unlink()
            raise UserError(
                f"data: {text}: what arrived has the {kind} checksum {found}, not {digest}; repeat the command, and if it stays so mend the address"
            )


def _digest(path: Path, kind: str) -> str:
    """Return a file's checksum; "git" is the SHA-1 of git's blob: the file behind a header with its size."""
    start = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()) if kind == "git" else hashlib.new(kind)
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            start.update(block)
    return start.hexdigest()


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time fetch a file."""
    with path.with_name(f"{path.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
