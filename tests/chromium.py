"""A real browser for tests: Chromium, headless, driven over a pipe by the DevTools protocol.
Nothing to install but Chromium.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars"),
)
PATIENCE = 60.0


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One page. `errors` collects what the console and the page complain about."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer = write, read, b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        self.loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        said = None
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            said = json.dumps(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] != "log":
            said = json.dumps(params["args"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            said = params["entry"]["text"]
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            said = None if url.startswith(("file:", "data:", "about:")) else f"it asked for {url}"
        if said is not None:
            self.errors.append(said[:400])

    def open(self, path: Path) -> float:
        """Load a file and wait until it is drawn; the seconds that took."""
        self.errors.clear()
        self.loaded = False
        began = time.monotonic()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            self._next()
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        how = {"awaitPromise": True, "returnByValue": True}
        answer = self.send("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.run("new Promise(done => setTimeout(done, 150))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A fresh browser with its profile in an empty folder; it ends with the block."""
    program = find_chromium()
    assert program is not None
    # Away from 3 and 4.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 50) for end in (*os.pipe(), *os.pipe())]
    its_in, write, read, its_out = ends

    def plug() -> None:
        os.dup2(its_in, 3)
        os.dup2(its_out, 4)

    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=plug,
        close_fds=True,
        pass_fds=(3, 4),
        start_new_session=True,  # in our group its helpers would look like orphans of ours
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(write, read)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whoever of them is still there
        os.close(write)
        os.close(read)
