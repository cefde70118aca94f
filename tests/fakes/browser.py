"""A headless Chromium, driven over WebDriver by chromedriver. Both must be on PATH."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from fakes.ports import free_port

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DEADLINE = 120.0

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)


def missing() -> str:
    """Skip reason if no browser is available; otherwise empty."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium on PATH (Debian: apt-get install chromium)"
    return "" if shutil.which("chromedriver") else "no chromedriver on PATH (Debian: apt-get install chromium-driver)"


class Browser:
    """One window of a browser with an empty profile in ``folder``."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self._driver = subprocess.Popen(
            [str(shutil.which("chromedriver")), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE, trust_env=False)
        self.session = ""
        binary = next(found for found in map(shutil.which, BROWSERS) if found)
        options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL"}}
        self.wait(self._ready)
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"

    def open(self, address: str) -> None:
        self._call("POST", f"{self.session}/url", {"url": address})

    @property
    def address(self) -> str:
        return str(self._call("GET", f"{self.session}/url"))

    def run(self, script: str) -> Any:
        """Run a script in the page and return its result."""
        return self._call("POST", f"{self.session}/execute/sync", {"script": script, "args": []})

    def press(self, text: str) -> None:
        keys = [{"type": kind, "value": letter} for letter in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": keys}]
        self._call("POST", f"{self.session}/actions", {"actions": actions})

    def picture(self) -> bytes:
        """A screenshot as PNG."""
        return base64.b64decode(self._call("GET", f"{self.session}/screenshot"))

    def network(self) -> list[dict[str, Any]]:
        """Network events since the last call, as DevTools protocol events."""
        logged = self._call("POST", f"{self.session}/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in logged]
        return [event for event in events if event["method"].startswith("Network.")]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, "the condition never held in the browser"
            time.sleep(0.05)

    def close(self) -> None:
        if self.session:
            self._call("DELETE", self.session)
        self._http.close()
        self._driver.terminate()
        self._driver.wait()

    def _ready(self) -> bool:
        try:
            return bool(self._call("GET", "/status")["ready"])
        except httpx.TransportError:
            return False

    def _call(self, method: str, path: str, body: object = None) -> Any:
        answer = self._http.request(method, path, json=body) if method == "POST" else self._http.request(method, path)
        value = answer.json()["value"]
        assert answer.is_success, value
        return value
