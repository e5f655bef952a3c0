"""A model hub on loopback: a few repositories at one commit, answered as huggingface_hub's client expects it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves files under "OWNER/NAME" (models) and "datasets/OWNER/NAME", each a dictionary of name -> content, at `COMMIT`."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        """Address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        repo, _, rest = path.partition("/resolve/")
        commit, _, name = rest.partition("/")
        content = self.server.repositories.get(repo, {}).get(name)
        if path.endswith(f"/tree/{COMMIT}") and path.startswith("api/models/"):
            repo = path.removeprefix("api/models/").removesuffix(f"/tree/{COMMIT}")
            self._send(200, json.dumps(_listing(self.server.repositories[repo])).encode(), body)
        elif commit == COMMIT and content is not None:
            self.server.sent += [name] if body else []
            self._send(200, content, body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, code: int, content: bytes, body: bool) -> None:
        self.send_response(code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_git_blob(content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _git_blob(content: bytes) -> str:
    """The checksum that the hub keeps of a small file: git's SHA-1 of a blob."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _listing(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _git_blob(content)}
        for name, content in files.items()
    ]


@contextmanager
def hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve the repositories for as long as the block lasts."""
    server = Hub(repositories)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
