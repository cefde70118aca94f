"""The web console, tested without a browser: access, traffic, and no leftover processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from yarl import URL

SECONDS = 60.0
READ_ONLY = b"nothing can be changed here"
ELSEWHERE = {"Origin": "http://evil.example"}


class Web:
    def __init__(self, home: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_console", "--state", str(home), "--refresh", "0.2", "web", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMUX": "/tmp/tmux-0/default,1,0", "LC_ALL": "C"},
        )
        assert self.process.stdout is not None
        self.printed = ""
        while "ctrl+c" not in self.printed:
            line = self.process.stdout.readline()
            assert line, "it ended"
            self.printed += line
        found = re.search(r"http://\S+", self.printed)
        assert found is not None
        self.link = found[0]
        self.page, _, self.token = self.link.partition("?token=")
        self.origin = "http://" + urlsplit(self.link).netloc

    def consoles(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> int:
        """End it as Ctrl+C does; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    made = Web(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    """A client session that keeps cookies as a browser does."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def status(browser: aiohttp.ClientSession, address: str, **headers: str) -> int:
    async with browser.get(address, headers=headers) as answer:
        return answer.status


async def connect(browser: aiohttp.ClientSession, web: Web, **query: str) -> aiohttp.ClientWebSocketResponse:
    address = URL(f"{web.page}ws").with_query(query or {"width": "120", "height": "40"})
    return await browser.ws_connect(address, headers={"Origin": web.origin})


async def wait_for(page: aiohttp.ClientWebSocketResponse, *wanted: bytes) -> bytes:
    """Read output until all of ``wanted`` has appeared."""
    drawn = b""
    async with asyncio.timeout(SECONDS):
        while not all(text in drawn for text in wanted):
            message = await page.receive()
            assert message.type is aiohttp.WSMsgType.BINARY, (message, drawn)
            drawn += message.data
    return drawn


async def gone(processes: list[psutil.Process]) -> None:
    def there(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it ended between the two checks
            return False

    async with asyncio.timeout(SECONDS):
        while any(map(there, processes)):
            await asyncio.sleep(0.02)


async def test_link_admits_only_one_browser(web, browser):
    assert await status(browser, web.page) == 403
    assert await status(browser, f"{web.page}?token=wrong") == 403
    assert await status(browser, f"{web.origin}/?token={web.token}") == 403, "only below its path"
    async with browser.get(web.link) as answer:
        assert answer.status == 200
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert f"Path={urlsplit(web.page).path}" in cookie
        assert web.token not in cookie + await answer.text()
    assert await status(browser, web.page) == 200
    assert await status(browser, web.link) == 200, "again, from the browser with the cookie"
    async with aiohttp.ClientSession() as other, other.get(web.link) as answer:
        assert answer.status == 403
        assert "works once" in await answer.text()


async def test_wrong_host_or_origin_is_refused_without_consuming_link(web, browser):
    for headers in ({"Host": "evil.example"}, ELSEWHERE, {"Origin": "null"}):
        assert await status(browser, web.link, **headers) == 403
    assert await status(browser, web.link) == 200
    for headers in ({"Host": f"evil.example:{urlsplit(web.link).port}"}, ELSEWHERE):
        assert await status(browser, web.page, **headers) == 403


async def test_terminal_requires_cookie_and_origin(web, browser):
    async def refused(session: aiohttp.ClientSession, **headers: str) -> int:
        with pytest.raises(aiohttp.WSServerHandshakeError) as error:
            await session.ws_connect(f"{web.page}ws", headers=headers)
        return error.value.status

    assert await refused(browser, Origin=web.origin) == 403
    assert await status(browser, web.link) == 200
    assert await refused(browser) == 403
    assert await refused(browser, **ELSEWHERE) == 403
    assert await refused(browser, Origin=web.origin, Host="evil.example") == 403
    async with aiohttp.ClientSession() as other:
        assert await refused(other, Origin=web.origin) == 403
    assert web.consoles() == []


async def test_page_loads_no_external_resources(web, browser):
    await status(browser, web.link)
    async with browser.get(web.page) as answer:
        page = await answer.text()
        policy = answer.headers["Content-Security-Policy"]
    assert re.findall(r"\w+://[^/\"]+", page) == [web.origin.replace("http", "ws")]
    assert "default-src 'none'" in policy
    assert re.findall(r"\w+://\S+", policy) == [web.origin.replace("http", "ws") + ";"]
    for name in re.findall(r"(?:href|src)=\"([\w/.-]+)\"|url\(\"([^\"]+)\"\)", page):
        if (address := name[0] or name[1]) != "./":
            assert await status(browser, web.page + address) == 200, address
    async with browser.get(f"{web.page}static/css/xterm.css") as answer:
        assert "@import" not in (sheet := await answer.text())
        assert "url(" not in sheet


async def test_console_handles_drawing_keys_resize_and_page_close(web, browser):
    await status(browser, web.link)
    page = await connect(browser, web)
    await wait_for(page, b"vllm-console", READ_ONLY)
    (console,) = web.consoles()
    assert "--read-only" in console.cmdline()
    assert web.token not in " ".join(console.cmdline() + list(console.environ().values()))
    assert not {"TMUX"} & console.environ().keys()
    for odd in ("", "{}", "[1]", '["resize", {"width": -1, "height": 5}]', '["stdin", 5]', "[" * 5000):
        await page.send_str(odd)
    await page.send_str('["ping", "7"]')
    async with asyncio.timeout(SECONDS):
        while (message := await page.receive()).type is not aiohttp.WSMsgType.TEXT:
            assert message.type is aiohttp.WSMsgType.BINARY
    assert json.loads(message.data) == ["pong", "7"]
    await page.send_str('["stdin", "?"]')
    await wait_for(page, b"Help")
    await page.send_str('["stdin", "\\u001b"]')
    await page.send_str('["resize", {"width": 80, "height": 24}]')
    await wait_for(page, b"\x1b[24;1H")
    await page.close()
    await gone([console])


async def test_quitting_console_closes_page(web, browser):
    await status(browser, web.link)
    page = await connect(browser, web)
    await wait_for(page, READ_ONLY)
    consoles = web.consoles()
    await page.send_str('["stdin", "q"]')
    async with asyncio.timeout(SECONDS):
        async for _ in page:
            pass
    assert page.closed
    await gone(consoles)
    again = await connect(browser, web)
    await wait_for(again, READ_ONLY)
    await again.close()


async def test_each_page_has_a_console_that_ends_with_the_server(web, browser):
    await status(browser, web.link)
    pages = [await connect(browser, web) for _ in range(2)]
    for page in pages:
        await wait_for(page, READ_ONLY)
    consoles = web.consoles()
    assert len(consoles) == 2
    reading = [asyncio.ensure_future(page.receive()) for page in pages]
    assert await asyncio.to_thread(web.close) == 0
    for task in reading:
        task.cancel()
    await gone(consoles)


async def test_consoles_end_when_web_server_is_killed(web, browser):
    await status(browser, web.link)
    page = await connect(browser, web)
    await wait_for(page, READ_ONLY)
    consoles = web.consoles()
    assert consoles
    web.process.kill()
    await gone(consoles)


async def test_connection_reset_ends_console(web, browser):
    """Like a killed browser."""
    await status(browser, web.link)
    page = await connect(browser, web)
    await wait_for(page, READ_ONLY)
    consoles = web.consoles()
    transport = page.get_extra_info("transport") or page._conn.transport
    transport.abort()
    await gone(consoles)


async def test_hanging_console_is_killed(web, browser):
    await status(browser, web.link)
    page = await connect(browser, web)
    await wait_for(page, READ_ONLY)
    (console,) = web.consoles()
    console.suspend()
    await page.close()
    await gone([console])


async def test_with_changes_allowed(tmp_path, browser):
    web = Web(tmp_path / "state", "--allow-changes")
    try:
        assert "can start, change and stop" in web.printed
        await status(browser, web.link)
        page = await connect(browser, web)
        drawn = await wait_for(page, b"vllm-console", b"Servers")
        assert READ_ONLY not in drawn
        assert "--read-only" not in web.consoles()[0].cmdline()
        await page.close()
    finally:
        web.close()


def test_listens_on_loopback_only(web):
    listening = [found for found in psutil.Process(web.process.pid).net_connections("inet") if found.status == "LISTEN"]
    assert [found.laddr.ip for found in listening] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--port", "70000"), 2, "expected a port from 1 to 65535"),
        (("--allow-changes",), 2, "--read-only and --allow-changes contradict each other"),
    ],
)
def test_invalid_arguments(tmp_path, words, code, said):
    program = [sys.executable, "-m", "vllm_console", "--read-only", "--state", str(tmp_path), "web", *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == code
    assert said in done.stderr


def test_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        program = [sys.executable, "-m", "vllm_console", "--state", str(tmp_path), "web", "--port", port]
        done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


def test_without_textual_serve(tmp_path):
    program = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'textual_serve' else find(name, *rest)\n"
        "from vllm_console.cli.main import main\n"
        "sys.exit(main(['--state', sys.argv[1], 'web']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert "needs textual_serve" in done.stderr
    assert "pip install 'vllm-console[web]'" in done.stderr


@pytest.mark.parametrize(
    ("named", "said"),
    [("nothing.at.all:Driver", "No module named"), ("os:nothing", "nothing"), ("os.path:join", "not a Textual driver")],
)
def test_invalid_driver_is_reported(tmp_path, named, said):
    env = {**os.environ, "TEXTUAL_DRIVER": named}
    program = [sys.executable, "-m", "vllm_console", "--state", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 2, done.stderr
    assert "TEXTUAL_DRIVER" in done.stderr
    assert said in done.stderr


def test_console_under_textual_serve_ends_with_its_output_pipe(tmp_path):
    """What ``textual serve vllm-console`` runs: packets go to a pipe, and it ends when the pipe closes."""
    env = {**os.environ, "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver"}
    program = [sys.executable, "-m", "vllm_console", "--state", str(tmp_path / "state")]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"__GANGLION__\n"
    assert process.stdout.read(1) == b"D"
    process.stdin.close()
    process.stdout.close()
    assert process.wait(SECONDS) in (0, 1)
