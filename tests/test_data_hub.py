"""Files of a dataset hub, from a server on loopback that answers as the hub does: metadata, byte ranges, broken transfers, wrong contents."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scalerl import recipe as recipes
from scalerl.data import hub
from scalerl.data.prepare import dataset_key
from warehouse.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = "".join(
    json.dumps({"problem": f"What is {n} + {n}?", "answer": 2 * n, "difficulty": "3/8"}) + "\n" for n in range(4000)
).encode()
ADDRESS = f"hub://owner/polaris@{COMMIT}/data/rows.jsonl"


class Hub(ThreadingHTTPServer):
    """Serves one file under the hub's resolve address; `cut` is how many bytes the next transfers send before the line breaks."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.etag, self.cut = CONTENT, hashlib.sha256(CONTENT).hexdigest(), list[int]()
        self.ranges: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: bool) -> None:
        if self.path.split("?")[0] != f"/datasets/owner/polaris/resolve/{COMMIT}/data/rows.jsonl":
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted, content = self.headers["Range"], self.server.content
        begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted and body else 0
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{self.server.etag}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("ETag", '"pointer"')
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if body:
            self.server.ranges.append(wanted)
            end = begin + self.server.cut.pop(0) if self.server.cut else len(content)
            self.wfile.write(content[begin:end])
            self.close_connection = True

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)


@pytest.fixture
def served(scalerl_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback, and this process online for it alone."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_file_is_fetched_once_and_then_needs_no_hub(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.fetch(ADDRESS)
    assert path.read_bytes() == CONTENT
    assert served.ranges == [None]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.fetch(ADDRESS) == path
    assert served.ranges == [None]


def test_a_broken_transfer_goes_on_where_it_stopped(served: Hub) -> None:
    served.cut = [50_000, 30_000]
    assert hub.fetch(ADDRESS).read_bytes() == CONTENT
    assert served.ranges == [None, "bytes=50000-", "bytes=80000-"]


def test_a_killed_process_leaves_a_part_that_the_next_one_completes(served: Hub) -> None:
    address = hub.parse(ADDRESS)
    address.path.parent.mkdir(parents=True)
    part = address.path.with_name(f"{address.path.name}.{served.etag[:16]}.part")
    part.write_bytes(CONTENT[:70_001])
    assert hub.fetch(ADDRESS).read_bytes() == CONTENT
    assert served.ranges == ["bytes=70001-"]
    assert not part.exists()


def test_what_does_not_have_the_checksum_is_not_taken(served: Hub) -> None:
    served.content = CONTENT.replace(b"What", b"Shat", 1)
    with pytest.raises(UserError, match="what arrived has the sha256 checksum"):
        hub.fetch(ADDRESS)
    assert [path.suffix for path in hub.parse(ADDRESS).path.parent.iterdir()] == [".lock"]
    # A part of other bytes is found out too, and the next call starts anew.
    served.content = CONTENT
    part = hub.parse(ADDRESS).path.with_name(f"rows.jsonl.{served.etag[:16]}.part")
    part.write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match="checksum"):
        hub.fetch(ADDRESS)
    assert hub.fetch(ADDRESS).read_bytes() == CONTENT


def test_small_files_are_checked_by_gits_own_number(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(CONTENT)
    served.etag = subprocess.run(
        ["git", "hash-object", "--no-filters", str(tmp_path / "rows")], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert hub.fetch(ADDRESS).read_bytes() == CONTENT


def test_the_addresss_own_checksum_counts(served: Hub) -> None:
    md5 = hashlib.md5(CONTENT).hexdigest()
    assert hub.fetch(f"{ADDRESS}#md5={md5}").read_bytes() == CONTENT
    with pytest.raises(UserError, match=f"has the md5 {md5}; mend the address"):
        hub.fetch(f"{ADDRESS}#md5={'0' * 32}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hub://owner/polaris/rows.jsonl", "no revision is named; name the commit"),
        ("hub://owner/polaris@main/rows.jsonl", "the revision 'main' may move"),
        (f"hub://owner/polaris@{COMMIT}/../../x", "no address of a dataset file"),
        (f"hub:/owner@{COMMIT}/x", "no address of a dataset file"),
        (f"hub://owner/polaris@{COMMIT}/x#md5=00", "a md5 has 32 hex digits, this one 2"),
    ],
)
def test_an_address_that_names_no_content_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        hub.parse(text)


def test_what_cannot_be_fetched_is_one_line(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="cannot be fetched") as raised:
        hub.fetch(ADDRESS.replace("rows", "none"))
    assert "\n" not in str(raised.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set and the file is not in"):
        hub.fetch(ADDRESS)


def test_a_data_set_from_the_hub_has_the_name_of_the_same_file_here(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(CONTENT)
    local, remote = (
        recipes.load("scalerl", [f'data.path="{path}"', "data.source=polaris", "data.decontaminate=[]"])
        for path in (tmp_path / "rows.jsonl", ADDRESS)
    )
    assert dataset_key(remote) == dataset_key(local)


def test_offline_mode_of_the_environment_is_obeyed(scalerl_home: Path) -> None:
    code = f"from scalerl.data import hub\nhub.fetch({ADDRESS!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "UserError" in done.stderr and "HF_HUB_OFFLINE is set" in done.stderr
