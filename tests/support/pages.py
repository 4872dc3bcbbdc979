"""The served page in a browser: buttons pressed, files chosen, and what is waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.browser import Browser, Tab

_SECONDS = 300.0  # other tests run beside this one


class ServedPage:
    """The page of a server, opened."""

    def __init__(self, browser: Browser, url: str, **screen: Any) -> None:
        self.tab: Tab = browser.open(url, **screen)

    def until(self, expression: str) -> float:
        """Wait until an expression holds; how long that took."""
        began = time.monotonic()
        while not self.tab.run(f"Boolean({expression})"):
            if time.monotonic() - began > _SECONDS:
                raise AssertionError(f"{expression} never holds: {self.tab.run('document.body.innerText')}")
            time.sleep(0.02)
        return time.monotonic() - began

    def ready(self) -> None:
        self.until("document.getElementById('model').textContent.includes('is ready')")

    def click(self, name: str) -> None:
        self.tab.run(f"document.getElementById({name!r}).click()")

    def put(self, name: str, value: object) -> None:
        """A value into a field, as typing it does."""
        self.tab.run(f"""(() => {{
            const one = document.getElementById({name!r});
            one.value = {json.dumps(value)};
            for (const kind of ["input", "change"]) one.dispatchEvent(new Event(kind, {{ bubbles: true }}));
        }})()""")

    def choose(self, files: Sequence[Path]) -> None:
        """Files, as choosing them does."""
        document = self.tab.call("DOM.getDocument")["root"]["nodeId"]
        node = self.tab.call("DOM.querySelector", nodeId=document, selector="#files")["nodeId"]
        self.tab.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in files])
        self.until("!document.getElementById('go-file').disabled")

    def done(self) -> float:
        """Wait until the job of the page is over."""
        return self.until("document.getElementById('bar').hidden")

    def text(self, name: str) -> str:
        found: str = self.tab.run(f"document.getElementById({name!r}).innerText")
        return found

    def quiet(self) -> None:
        """Nothing was refused, thrown or written to the console, and nothing asked for elsewhere."""
        assert self.tab.run("violations") == []
        assert self.tab.complaints() == []
        own = self.tab.run("location.origin")
        others = [url for url in self.tab.requests() if not url.startswith((own, "data:"))]
        assert others == []
