"""Sends streaming completions to one server and times what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx
import msgspec

from vllm_console.load.report import Tally
from vllm_console.load.shape import Request
from vllm_console.load.stream import Answer, AnswerError, message_of
from vllm_console.text import plain
from vllm_launchers.addresses import is_loopback

CONNECT_SECONDS = 10.0
LARGEST_ERROR = 64 * 1024
LARGEST_MODELS = 1024 * 1024
MOST_NAMED = 8
"""Served models that an error names."""


class LoadError(Exception):
    """The load cannot be sent. One sentence for people: what is wrong and what to do."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class Target(msgspec.Struct, frozen=True):
    """A served model: its name, and its context in tokens if the server says so."""

    model: str
    max_model_len: int | None


def check_url(url: str, *, allow_remote: bool) -> str:
    """The base URL without a trailing slash or ``/v1``.

    Raises:
        LoadError: it is no http URL, or not on this machine and ``allow_remote`` is not given.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise LoadError(f"'{plain(url, 200)}' is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise LoadError(f"'{plain(url, 200)}' is no URL of a server; give one such as http://127.0.0.1:8000")
    if not allow_remote and not is_loopback(host):
        raise LoadError(f"{plain(host, 200)} is not this machine; say --remote if load should really be sent there")
    return url.rstrip("/").removesuffix("/v1")


def open_client(base: str, api_key: str | None, max_in_flight: int, *, own: bool = False) -> httpx.AsyncClient:
    """A client for one server. Proxies and ``.netrc`` of the environment are not used; reads have no time limit.

    Raises:
        LoadError: the address or the key is none that HTTP can carry.
    """
    headers = {"content-type": "application/json", "accept-encoding": "identity"} | (
        {"authorization": f"Bearer {api_key}"} if api_key else {}
    )
    try:
        return httpx.AsyncClient(
            base_url=base,
            headers=headers,
            trust_env=False,
            # A server on this machine shows whatever certificate it was given, often made by itself.
            verify=not (own or is_loopback(urlsplit(base).hostname or "")),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=max_in_flight + 1, max_keepalive_connections=max_in_flight),
        )
    except httpx.InvalidURL as error:
        raise LoadError(f"'{plain(base, 200)}' is no URL: {plain(str(error), 200)}") from error
    except UnicodeEncodeError as error:
        raise LoadError("the API key in VLLM_API_KEY has characters that no HTTP header can carry") from error


async def find_target(client: httpx.AsyncClient, model: str | None) -> Target:
    """Ask ``/v1/models`` what is served; ``model`` None takes the first.

    Raises:
        LoadError: nothing answers, not as vLLM does, or the model is not served.
    """
    base = str(client.base_url)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            status, body = await _models(client)
    except httpx.ConnectError as error:
        raise LoadError(f"nothing answers at {base}: no connection; is the server up?") from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise LoadError(f"{base} does not answer within {CONNECT_SECONDS:.0f} s; does it hang?") from error
    except httpx.HTTPError as error:
        raise LoadError(f"{base} does not speak HTTP as vLLM does: {plain(str(error), 200)}") from error
    if status in (401, 403):
        raise LoadError(f"{base} wants an API key: set VLLM_API_KEY to it")
    if status != 200:
        raise LoadError(f"{base} does not answer /v1/models as vLLM does: status {status}")
    return target_in(body, model, base)


async def _models(client: httpx.AsyncClient) -> tuple[int, bytes]:
    """Status and body of ``/v1/models``: of a longer body only as much as shows that it is no such answer."""
    body = bytearray()
    async with client.stream("GET", "/v1/models") as answer:
        async for data in answer.aiter_raw():
            body += data
            if len(body) > LARGEST_MODELS:
                break
        return answer.status_code, bytes(body)


def target_in(body: bytes, model: str | None, base: str) -> Target:
    """What a body of ``/v1/models`` says is served at ``base``; ``model`` None takes the first.

    Raises:
        LoadError: it is no such body, or the model is not among those served.
    """
    try:
        if len(body) > LARGEST_MODELS:
            raise ValueError(f"more than {LARGEST_MODELS >> 20} MiB")
        models = msgspec.json.decode(body, type=_Models).data
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{base} does not answer /v1/models as vLLM does: {plain(str(error), 200)}") from error
    chosen = next((one for one in models if model in (None, one.id)), None)
    if chosen is None:
        served = ", ".join(plain(one.id, 200) for one in models[:MOST_NAMED]) or "nothing"
        more = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
        raise LoadError(f"{base} serves {served}{more}, not {plain(model or 'a model', 200)}")
    return Target(chosen.id, chosen.max_model_len)


class Sender:
    """Sends requests when they are due, never more than ``max_in_flight`` at once, and tallies the answers."""

    def __init__(self, client: httpx.AsyncClient, model: str, tally: Tally, max_in_flight: int) -> None:
        self.model = model
        self._client = client
        self._tally = tally
        self._slots = asyncio.Semaphore(max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()

    async def play(self, requests: Iterable[Request], stop: asyncio.Event) -> None:
        """Send each request when it is due, counted from now; returns when all are sent or ``stop`` is set."""
        begin = time.perf_counter()
        for request in requests:
            if await wait(stop, begin + request.at - time.perf_counter()):
                return
            if self._slots.locked():
                self._tally.held_back += 1
            if not await self._take_slot(stop):
                return
            self._tally.sent += 1
            task = asyncio.create_task(self._send(request))
            self._tasks.add(task)
            task.add_done_callback(self._done)
            await asyncio.sleep(0)  # arrivals that are due at once must not keep the answers from being read

    async def drain(self, stop: asyncio.Event) -> None:
        """Wait until all answers are in or ``stop`` is set."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while self._tasks and not stop.is_set():
                await asyncio.wait([*self._tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    async def cancel(self, kind: str) -> None:
        """Break off what is under way; it counts as failed with this sentence."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, asyncio.CancelledError):
                self._tally.fail(kind)

    async def _take_slot(self, stop: asyncio.Event) -> bool:
        if not self._slots.locked():
            await self._slots.acquire()
            return True
        waits = {asyncio.create_task(self._slots.acquire()), asyncio.create_task(stop.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not stop.is_set()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    async def _send(self, request: Request) -> None:
        """One request from start to end; never raises but when cancelled."""
        tally = self._tally
        begin = time.perf_counter()
        answer = Answer(tally)
        try:
            await self._stream(request, answer, begin)
        except httpx.ConnectError:
            tally.fail("connection refused")
        except httpx.TimeoutException:
            tally.fail(f"no connection within {CONNECT_SECONDS:.0f} s")
        except httpx.HTTPError:
            tally.fail("the connection broke off")
        except AnswerError as error:
            tally.fail(str(error))
        else:
            tally.completed += 1
            tally.e2e.add(time.perf_counter() - begin)

    async def _stream(self, request: Request, answer: Answer, begin: float) -> None:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._client.stream("POST", "/v1/completions", content=msgspec.json.encode(body)) as response:
            if response.status_code != 200:
                raise AnswerError(f"HTTP {response.status_code}: {await _reason(response)}")
            answer.begin(begin)
            async for data in response.aiter_raw():
                answer.feed(data, time.perf_counter())
        answer.end()


async def _reason(response: httpx.Response) -> str:
    """What a refusing server says, in one line."""
    body = b""
    async for data in response.aiter_raw():
        body += data
        if len(body) > LARGEST_ERROR:
            break
    return message_of(body) or "no reason given"


async def wait(stop: asyncio.Event, seconds: float) -> bool:
    """Sleep for ``seconds`` unless ``stop`` is set before; whether it is set."""
    if seconds > 0:
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            return False
    return stop.is_set()
