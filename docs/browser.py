"""A headless Chromium, driven through its DevTools socket: open a page, wait for something on it, press, take a picture.

Needs a Chromium (`apt-get install chromium`) and `websockets`, which Prefect brings along. Only loopback pages are opened.
"""

import base64
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-prefers-reduced-motion")
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
DEADLINE_S = 180
# What pictures do not show (a regular expression) -> what stands there instead.
ROOT = Path(__file__).resolve().parents[1]
NEUTRAL = {re.escape(sys.prefix): ".venv", re.escape(str(ROOT)): "~/scalerl", re.escape(str(Path.home())): "~"}
NEUTRAL |= {rf"\b{re.escape(socket.gethostname())}\b": "localhost"}
REPLACE = """(() => {
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) words.currentNode.data = words.currentNode.data.replace(new RegExp(%s, 'g'), %s);
})()"""


class Page:
    """The one page of a browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.sent = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command; return its result. Raises RuntimeError where the browser refuses, TimeoutError past the deadline."""
        self.sent += 1
        self.connection.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        while (reply := json.loads(self.connection.recv(timeout=DEADLINE_S))).get("id") != self.sent:
            pass
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return dict(reply["result"])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open(self, address: str, width: int = 1280, height: int = 900) -> None:
        """Load an address in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=address)

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression holds. Raises TimeoutError past the deadline, with what the page shows."""
        end = time.monotonic() + DEADLINE_S
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} never held; the page shows: {self.text()[:400]}")
            time.sleep(0.2)

    def text(self) -> str:
        """The words that the page shows."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def settle(self, quiet_s: float = 2.0) -> None:
        """Wait until the page shows words and has not changed for a while."""
        end, since, seen = time.monotonic() + DEADLINE_S, time.monotonic(), ""
        look = "document.body && document.body.innerText.trim() ? document.body.innerHTML.length + document.body.innerText : ''"
        while time.monotonic() < end and (not seen or time.monotonic() - since < quiet_s):
            now = str(self.value(look))
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.2)

    def press(self, label: str) -> None:
        """Press the button with this label, once it is there and enabled."""
        button = f"[...document.querySelectorAll('button')].find(b => b.innerText.trim() === {json.dumps(label)} && !b.disabled)"
        self.wait(button)
        self.value(f"{button}.click()")

    def picture(self, target: Path) -> None:
        """Write what the window shows as PNG, with neutral words for the name and the folders of this machine."""
        for long, brief in NEUTRAL.items():
            self.value(REPLACE % (json.dumps(long), json.dumps(brief)))
        target.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """Start a browser with an empty profile; give its page; end it. Raises RuntimeError where there is none, or it does not start."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise RuntimeError("no Chromium here; install one: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *OPTIONS, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(page_socket(Path(profile), process), max_size=None, open_timeout=DEADLINE_S) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)


def page_socket(profile: Path, process: "subprocess.Popen[bytes]") -> str:
    """The address of the page's DevTools socket, once the browser listens. Raises RuntimeError where it ended or takes too long."""
    written = profile / "DevToolsActivePort"
    end = time.monotonic() + DEADLINE_S
    while not (written.is_file() and "\n" in written.read_text()):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the browser did not start")
        time.sleep(0.1)
    port = written.read_text().split("\n")[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=60) as reply:
        pages = json.load(reply)
    return str(next(page for page in pages if page["type"] == "page")["webSocketDebuggerUrl"])
