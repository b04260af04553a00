"""Chromium without a window, driven over its own protocol (Chrome DevTools, through a pipe): no driver to install."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0  # for one answer
# The browser reads from descriptor 3 and writes to 4.
LAUNCH = (
    "import fcntl, os, sys; ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]; "
    "os.dup2(ends[0], 3); os.dup2(ends[1], 4); os.execv(sys.argv[3], sys.argv[3:])"
)
LOUD = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.loadingFailed")


def chromium_path() -> str | None:
    """The browser's path; None where there is none."""
    wanted = os.environ.get("AUTOATTN_CHROMIUM")
    return wanted or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; what it complains of is kept."""

    def __init__(self, path: str, profile: Path) -> None:
        read_end, ours_out = os.pipe()
        ours_in, write_end = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", LAUNCH, str(read_end), str(write_end), path, "--headless=new", "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
                "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=[read_end, write_end], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        self._out, self._in, self._rest, self._last = ours_out, ours_in, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network", "Performance"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, page: Path, *, width: int, dark: bool = False, height: int = 900, media: str = "screen") -> float:
        """Loads a file at a width, in CSS pixels; returns the seconds until it had loaded and was painted once."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        begin = time.perf_counter()
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.perf_counter() - begin

    def run(self, script: str) -> Any:
        """The value of a script's last expression, awaited."""
        reply = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def complaints(self) -> list[str]:
        """Console messages, script errors and requests that failed, since the page was opened."""
        self.run("1")
        return [json.dumps(event["params"])[:400] for event in self.events if event.get("method") in LOUD]

    def requests(self) -> list[str]:
        """What the page asked for, itself included."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
