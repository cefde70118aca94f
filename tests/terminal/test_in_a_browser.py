"""The console in a real browser. Received data is read from the connection, drawn text from the screen."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import psutil
import pyte
import pytest

from fakes import browser as real

pytestmark = [pytest.mark.terminal, pytest.mark.skipif(bool(real.missing()), reason=real.missing())]

NONE_OF_OURS = ("chrome", "data", "devtools", "about", "blob")
"""URL schemes of a browser's internal requests."""


class Page:
    """The page of ``vllm-console web`` in a browser."""

    def __init__(self, window: real.Browser) -> None:
        self.window = window
        self.asked: list[str] = []
        self._screen: pyte.Screen | None = None
        self._stream: Any = None

    @property
    def text(self) -> str:
        """The rows sent to the page."""
        for event in self.window.network():
            self._take(event["method"].removeprefix("Network."), event["params"])
        return "\n".join(line.rstrip() for line in self._screen.display) if self._screen is not None else ""

    def forget(self) -> None:
        assert self.text
        self._screen = None

    def _take(self, method: str, told: dict[str, Any]) -> None:
        if method == "requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif method == "webSocketCreated":
            self.asked.append(told["url"])
            size = parse_qs(urlsplit(told["url"]).query)
            self._screen = pyte.Screen(int(size["width"][0]), int(size["height"][0]))
            self._stream = pyte.ByteStream(self._screen)
        elif method == "webSocketFrameReceived" and told["response"]["opcode"] == 2 and self._screen is not None:
            self._stream.feed(base64.b64decode(told["response"]["payloadData"]).replace(b"\x1b[>", b"\x1b[?"))

    def figure(self, column: str, server: str) -> str:
        """A value of the server table."""
        rows = self.text.splitlines()
        head = next((row for row in rows if "NAME" in row and column in row), "")
        row = next((row for row in rows if server in row and "ready" in row), "")
        end = head.find(column) + len(column)
        return row[:end].split()[-1] if head and row else ""


@pytest.fixture
def served(home: dict[str, str]) -> Iterator[Any]:
    """A running ``vllm-console web`` and its link."""
    program = [sys.executable, "-m", "vllm_console", "--refresh", "0.5", "web"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env={**os.environ, **home})
    assert process.stdout is not None
    link = ""
    while not link:
        line = process.stdout.readline()
        assert line, "it ended"
        link = next(iter(re.findall(r"http://\S+", line)), "")
    yield process, link
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


@pytest.fixture
def window(tmp_path: Path) -> Iterator[real.Browser]:
    made = real.Browser(tmp_path / "profile")
    yield made
    made.close()


def test_console_in_browser(command, served, window):
    """Open the link, see values change under traffic, press a key, close; the process ends."""
    process, link = served
    command("start", "chatbot", "--engine", "simulated", "--wait")
    page = Page(window)
    window.open(link)
    window.wait(lambda: page.figure("TOK/S", "chatbot") == "0")
    assert "token" not in window.address
    (console,) = psutil.Process(process.pid).children()
    window.wait(lambda: window.run("return document.body.classList.contains('-first-byte')"))
    before = window.picture()
    server = f"http://127.0.0.1:{json.loads(command('status', 'chatbot', '--json').stdout)['port']}"
    model = httpx.get(f"{server}/v1/models").json()["data"][0]["id"]
    asked = {"model": model, "prompt": "How many?", "max_tokens": 300}
    assert httpx.post(f"{server}/v1/completions", json=asked, timeout=60).is_success
    window.wait(lambda: page.figure("TOK/S", "chatbot").strip("0.–"))
    window.wait(lambda: window.picture() != before)

    assert "Help" not in page.text
    window.press("?")
    window.wait(lambda: "Help" in page.text)
    assert {urlsplit(address).netloc for address in page.asked if not address.startswith(NONE_OF_OURS)} == {
        urlsplit(link).netloc
    }
    window.open("about:blank")
    console.wait(60)
    assert psutil.Process(process.pid).children() == []

    page.forget()
    window.open(link.partition("?")[0])
    window.wait(lambda: "chatbot" in page.text)
    window.press("q")
    window.wait(lambda: window.run("return document.body.classList.contains('-closed')"))
    assert "The console has ended" in window.run("return document.body.innerText")
