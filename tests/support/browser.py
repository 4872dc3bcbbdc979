"""A real browser, as its users have it, driven over its own pipe (the DevTools protocol): nothing to install.

Not through choreographer, which starts browsers with --disable-web-security: what is tested here is security.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROME = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    not CHROME and "PREIMAGE_REQUIRE_BROWSER" not in os.environ,
    reason="NO BROWSER: the page is not tested as people see it",
)
_SECONDS = 120.0  # for one answer; other tests run beside this one
# Commands come in by descriptor 3 and answers go out by 4.
_SHELL = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip
_WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (e) => violations.push(`${e.violatedDirective} ${e.blockedURI}`));
"""


class Browser:
    """A browser in a process of its own, with a fresh profile; ``with Browser() as browser``."""

    def __enter__(self) -> Browser:
        assert CHROME, "PREIMAGE_REQUIRE_BROWSER is set, and there is no chromium or google-chrome"
        self._folder = tempfile.mkdtemp(prefix="preimage-browser-")
        command = ["sh", "-c", _SHELL, "sh", CHROME, *_FLAGS, f"--user-data-dir={self._folder}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._last = 0
        self._left = b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except Exception:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer; what happens meanwhile is kept in ``events``."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                answer: dict[str, Any] = message["result"]
                return answer
            self.events.append(message)

    def wait_for(self, method: str, session: str) -> None:
        """Until this has happened in a tab."""
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))
            part = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            assert part, "the browser says nothing any more"
            self._left += part
        line, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, page: Path | str, width: int = 1280, dark: bool = False, script: bool = True) -> Tab:
        """A page from disk, or at an address, in a tab of its own, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
        if not script:
            tab.call("Emulation.setScriptExecutionDisabled", value=True)
        tab.show(width, dark)
        tab.call("Page.navigate", url=page.absolute().as_uri() if isinstance(page, Path) else page)
        self.wait_for("Page.loadEventFired", session)
        return tab


class Tab:
    """One page, and what it does."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def show(self, width: int, dark: bool) -> None:
        """As on a screen of this width, for a reader of this theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=features)

    def run(self, expression: str) -> Any:
        """The value of an expression of javascript, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        return [event["params"]["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """What the console shows: violations of the policy, exceptions, messages."""
        return [
            json.dumps(event["params"])[:2000]
            for name in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
            for event in self._events(name)
        ]

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=9 if key == "Tab" else 13,
            )

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """The whole page as png."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def _events(self, method: str) -> list[dict[str, Any]]:
        self.run("1")  # whatever was on its way is here after the answer
        return [
            event for event in self.browser.events
            if event.get("method") == method and event.get("sessionId") == self.session
        ]  # fmt: skip
