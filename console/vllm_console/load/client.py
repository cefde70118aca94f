"""Sends streaming completions to one server and measures the responses."""

from __future__ import annotations

import asyncio
import math
import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import httpx
import msgspec

from vllm_console.load.events import AnswerError, EventStream, StreamEvent, check_finish, message_of
from vllm_console.load.report import Tally
from vllm_console.load.shape import LoadRequest
from vllm_console.load.transport import LeanTransport, connection_problem, unreachable
from vllm_console.text import plain
from vllm_launchers.addresses import is_loopback, reachable, server_url, tls_to_own
from vllm_launchers.errors import OperationError
from vllm_launchers.listeners import Listener, WrongProcessError, trusted
from vllm_launchers.secrets import API_KEY
from vllm_launchers.typed_decoding import decode_json, json_decoder


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Event(StreamEvent):
    choices: tuple[_Choice, ...] = ()


_decode = json_decoder(_Event).decode


class StreamedAnswer:
    """One streaming answer. The first event with a choice is the first token; gaps between such events are ITL.

    An event is timed when its bytes arrive, so events that arrive together have no gap. Tokens are counted by the
    server's ``usage``, else one per event. TTFT and e2e count from ``begin``, on the clock of `feed`; e2e ends with the
    last token, as in ``vllm bench serve``. ``place`` is the request's index in the load.
    """

    def __init__(self, tally: Tally, begin: float = 0.0, place: int = 0) -> None:
        self.tally = tally
        self._place = place
        self._stream = EventStream(_decode)
        self._begin = begin
        self._first: float | None = None
        self._last = begin
        self._tokens = 0
        self._finish: str | None = None
        self.counted = 0
        """Output tokens so far."""
        self.prompt_tokens: int | None = None
        """The prompt's length as reported by the server; None until then."""

    def feed(self, data: bytes, at: float) -> None:
        """Process bytes that arrived at ``at``.

        Raises:
            AnswerError: they are not an event stream of completions, or report an error.
        """
        for event in self._stream.feed(data):
            if event.choices:
                self._finish = event.choices[0].finish_reason or self._finish
                self._token(at)
            if event.usage is not None:
                self.prompt_tokens = event.usage.prompt_tokens
                if event.usage.completion_tokens is not None:
                    self._count(event.usage.completion_tokens)

    def end(self) -> None:
        """Handle the end of the stream. Raises AnswerError if it ended too soon."""
        check_finish(self._finish)
        if not self._stream.done or self._first is None:
            raise AnswerError("the answer ended before its last token")
        tpot = (self._last - self._first) / (self.counted - 1) if self.counted > 1 else None
        self.tally.finish(self._place, self._first - self._begin, tpot, self._last - self._begin)

    def cut_off(self, at: float, gap_limit: float = 0.0) -> None:
        """Handle the end of the load at ``at``, before this answer ended: pending latencies count as longer than that.

        A gap between tokens does not count if it is shorter than ``gap_limit`` seconds at that time.
        """
        tally = self.tally
        if self._first is None:
            tally.ttft.add_unfinished(at - self._last)
        elif at - self._last >= gap_limit:
            tally.itl.add_unfinished(at - self._last)
        tally.e2e.add_unfinished(at - self._begin)
        tally.cut_off += 1

    @property
    def begun(self) -> bool:
        """Whether its first token has arrived."""
        return self._first is not None

    def age(self, at: float) -> float:
        """Seconds from its scheduled arrival to ``at``."""
        return at - self._begin

    def _token(self, at: float) -> None:
        if self._first is None:
            self._first = at
            self.tally.ttft.add(at - self._begin)
        else:
            self.tally.itl.add(at - self._last)
        self._last = at
        self._tokens += 1
        if self._tokens > self.counted:
            self._count(self._tokens)

    def _count(self, tokens: int) -> None:
        """``tokens`` have arrived so far; updates the tally while the answer streams."""
        self.tally.output_tokens += tokens - self.counted
        self.counted = tokens


CONNECT_SECONDS = 10.0
LARGEST_ERROR = 64 * 1024
LARGEST_MODELS = 1024 * 1024
FAILURE_PAUSE = 0.1
"""Seconds before a closed loop replaces a failed request, so that a server that rejects everything is not flooded."""

MOST_NAMED = 8
"""Maximum number of served models that an error names."""

SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven engineers measure how long a server takes to answer. "
    "Every morning people ask about weather, trains, recipes, history and code; some write short notes, others whole "
    "letters with numbers such as 12, 47, 305 and 8,960. Paris, Tokyo, Nairobi and Lima lie far apart. "
    "A good answer names its source, gives one example, and ends: no more, no less! (Why? Because time is short.)"
)
"""Text for the server's tokenizer; its tokens make up the prompts."""

FEWEST_TOKENS = 32
"""A tokenizer that yields fewer distinct tokens for `SAMPLE_TEXT` is not used: prompts would repeat each other."""

LARGEST_TOKEN_ID = 1 << 31


Lookup = Callable[[], Listener | None]
"""Finds where a server listens on this machine; None if it does not. Raises OSError if other processes do."""


class LoadError(OperationError):
    """The load cannot be sent. The message is one sentence: what is wrong and what to do."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class ApiAccess(msgspec.Struct, frozen=True):
    """How to access a server: the API ``key`` to send and the environment ``variable`` it is from; both may be empty.

    ``ca`` names a file of certificates to trust; if empty, those of this machine.
    """

    key: str = ""
    variable: str = API_KEY
    ca: str = ""


NO_KEY = ApiAccess()


def own_access() -> ApiAccess:
    """Access with the key in ``VLLM_API_KEY``, which is for this user's servers."""
    return ApiAccess(os.environ.get(API_KEY, ""))


class LoadTarget(msgspec.Struct, frozen=True):
    """A served model: its name, and its context in tokens if the server reports it."""

    model: str = msgspec.field(name="id")
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[LoadTarget]


def check_url(url: str, *, allow_remote: bool) -> str:
    """The server's base URL.

    Raises:
        UsageError: it is not a server's URL.
        LoadError: it is not on this machine and ``allow_remote`` is not set.
    """
    server = server_url(url)
    if not allow_remote and not is_loopback(server.host):
        raise LoadError(f"{plain(server.host, 200)} is not this machine; use --remote to send load there")
    return server.base


def lookup_of(base: str) -> Lookup | None:
    """A lookup for what listens at a URL of this machine: a process of this user or of root. None for another machine.

    It is needed because another user may have bound the first address of ``localhost``.
    """
    server = server_url(base)
    host = reachable(server.host)
    return partial(trusted, host, server.port) if is_loopback(host) else None


def open_client(base: str, access: ApiAccess, lookup: Lookup | None = None) -> httpx.AsyncClient:
    """A client for one server. Ignores proxies and ``.netrc`` of the environment; reads have no timeout.

    ``lookup`` finds where a server of this machine listens: nothing, least of all the key, is sent anywhere else.
    """
    headers = {"content-type": "application/json", "accept-encoding": "identity"} | (
        {"authorization": f"Bearer {access.key}"} if access.key else {}
    )
    try:
        _ = httpx.URL(base).host  # fails for an invalid internationalized name
    except (httpx.InvalidURL, UnicodeError) as error:
        raise LoadError(f"'{plain(base, 200)}' is not a server URL: {plain(str(error), 200)}") from error
    try:
        return httpx.AsyncClient(
            base_url=base,
            headers=headers,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            # A server on this machine uses whatever certificate it was given, often a self-signed one.
            transport=LeanTransport(
                CONNECT_SECONDS,
                tls_to_own() if lookup is not None else ssl.create_default_context(cafile=access.ca or None),
                lookup,
            ),
        )
    except UnicodeEncodeError as error:
        raise LoadError(f"the API key in {access.variable} has characters that no HTTP header can carry") from error
    except OSError as error:
        raise LoadError(f"{plain(access.ca, 200)} can't be read as certificates") from error


def key_wanted(access: ApiAccess) -> str:
    """A clause saying that a server refused the API key, or requires one."""
    if access.key:
        return f"refuses the API key in {access.variable}"
    return f"requires an API key: {f'set {access.variable}' if access.variable else 'attach it again with --key-env'}"


async def find_served_model(client: httpx.AsyncClient, model: str | None, access: ApiAccess = NO_KEY) -> LoadTarget:
    """Query ``/v1/models``; ``model`` None takes the first. ``access`` is how the client reaches the server.

    Raises:
        LoadError: no answer, not vLLM's answer, or the model is not served.
    """
    base = str(client.base_url)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            status, body = await fetch_body(client, "GET", "/v1/models")
    except httpx.ConnectError as error:
        if isinstance(error.__cause__, WrongProcessError):
            raise LoadError(f"{error}: nothing was sent; use --remote to allow it") from error
        if why := unreachable(error):
            raise LoadError(f"no connection to {base}: {why}") from error
        raise LoadError(f"nothing answers at {base}: no connection; is the server up?") from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise LoadError(f"{base} does not answer within {CONNECT_SECONDS:.0f}s; does it hang?") from error
    except httpx.HTTPError as error:
        raise LoadError(f"{base} does not speak HTTP like vLLM: {plain(str(error), 200)}") from error
    if status in (401, 403):
        raise LoadError(f"{base} {key_wanted(access)}")
    if status != 200:
        raise LoadError(f"{base} does not answer /v1/models like vLLM: status {status}")
    return target_in(body, model, base)


async def find_vocabulary(client: httpx.AsyncClient, model: str) -> list[int]:
    """Ids of ordinary text tokens from the server's tokenizer; empty without ``/tokenize`` or with odd responses.

    Uses a fixed text, so prompts never contain special ids, such as those of images, which tokenizers put in different
    places.
    """
    body = msgspec.json.encode({"model": model, "prompt": SAMPLE_TEXT, "add_special_tokens": False})
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            status, answer = await fetch_body(client, "POST", "/tokenize", body)
        tokens = decode_json(answer, _Tokens).tokens if status == 200 else []
    except (httpx.HTTPError, TimeoutError, ValueError, RecursionError):
        return []
    found = sorted({token for token in tokens if 0 <= token < LARGEST_TOKEN_ID})
    return found if len(found) >= FEWEST_TOKENS else []


async def fetch_body(client: httpx.AsyncClient, method: str, path: str, content: bytes = b"") -> tuple[int, bytes]:
    """Status and body of a response; a body over the limit is cut off just beyond it."""
    async with client.stream(method, path, content=content) as answer:
        return answer.status_code, await read_body(answer, LARGEST_MODELS)


async def read_body(response: httpx.Response, most: int) -> bytes:
    """The body of a response, cut off just beyond ``most`` bytes."""
    body = bytearray()
    async for data in response.aiter_raw():
        body += data
        if len(body) > most:
            break
    return bytes(body)


def target_in(body: bytes, model: str | None, base: str) -> LoadTarget:
    """Find the served model at ``base`` in a body of ``/v1/models``; ``model`` None takes the first.

    Raises:
        LoadError: the body is invalid, or the model is not among those served.
    """
    try:
        if len(body) > LARGEST_MODELS:
            raise ValueError(f"more than {LARGEST_MODELS >> 20} MiB")
        models = decode_json(body, _Models).data
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{base} does not answer /v1/models like vLLM: {plain(str(error), 200)}") from error
    chosen = next((one for one in models if model in (None, one.model)), None)
    if chosen is None:
        served = ", ".join(plain(one.model, 200) for one in models[:MOST_NAMED]) or "nothing"
        more = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
        raise LoadError(f"{base} serves {served}{more}, not {plain(model or 'a model', 200)}")
    return chosen


class Sender:
    """Sends requests, at most ``max_in_flight`` at once, and tallies the answers.

    ``tally`` may be replaced at any time: a request counts in the one current at its start.
    """

    def __init__(self, client: httpx.AsyncClient, model: str, tally: Tally, max_in_flight: int) -> None:
        self.model = model
        self.tally = tally
        self.client = client
        self._slots = asyncio.Semaphore(max_in_flight)
        self._under_way: dict[asyncio.Task[bool], StreamedAnswer] = {}
        self._pause = 0.0
        """How long a failed request keeps its slot, in seconds."""

    async def play(self, requests: Iterable[LoadRequest], stop: asyncio.Event) -> None:
        """Open loop: send each request when it is due, counted from now; return when all are sent or at ``stop``."""
        begin = time.perf_counter()
        for request in requests:
            scheduled = begin + request.at
            if await wait(stop, scheduled - time.perf_counter()):
                return
            if self._slots.locked():
                self.tally.held_back += 1
            if not await self._take_slot(stop):
                return
            await self._start(request, scheduled)

    async def play_closed(self, requests: Iterable[LoadRequest], seconds: float | None, stop: asyncio.Event) -> None:
        """Closed loop: send a request whenever fewer than ``max_in_flight`` are in flight.

        A request's scheduled arrival is the moment its slot becomes free. Returns when all are sent, after ``seconds``,
        or at ``stop``.
        """
        end = math.inf if seconds is None else time.perf_counter() + seconds
        self._pause = FAILURE_PAUSE
        for request in requests:
            if not await self._take_slot(stop):
                return
            now = time.perf_counter()
            if now >= end:
                self._slots.release()
                return
            await self._start(request, now)

    async def _start(self, request: LoadRequest, scheduled: float) -> None:
        """Send a request in its own task, in the slot taken for it."""
        answer = StreamedAnswer(self.tally, scheduled, self.tally.sent)
        self.tally.sent += 1
        task = asyncio.create_task(self._send(request, answer, scheduled))
        self._under_way[task] = answer
        task.add_done_callback(self._done)
        await asyncio.sleep(0)  # arrivals due at once must not delay reading answers

    async def drain(self, stop: asyncio.Event) -> None:
        """Wait until all answers are complete or ``stop`` is set."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while self._under_way and not stop.is_set():
                await asyncio.wait([*self._under_way, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    async def cancel(self, kind: str) -> None:
        """Abort pending requests; they count as failed with this sentence, and as unfinished in the latencies."""
        await self._abort(dict(self._under_way), kind)

    async def _abort(self, surplus: Mapping[asyncio.Task[bool], StreamedAnswer], kind: str) -> None:
        now = time.perf_counter()
        for task in surplus:
            task.cancel()
        results = await asyncio.gather(*surplus, return_exceptions=True)
        for answer, result in zip(surplus.values(), results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                answer.cut_off(now)
                answer.tally.fail(kind)

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._under_way)

    def under_way(self, tally: Tally) -> list[StreamedAnswer]:
        """The unfinished answers of the requests counted in a tally."""
        return [answer for answer in self._under_way.values() if answer.tally is tally]

    async def trim(self, keep: int) -> int:
        """Abort all but ``keep`` requests, first those without a token, then the newest; return how many.

        They count as failed and unfinished in their tallies.
        """
        old_first = sorted(self._under_way.items(), key=lambda one: not one[1].begun)  # stable: else by their start
        surplus = dict(old_first[keep:])
        await self._abort(surplus, "aborted before the answer was complete")
        return len(surplus)

    async def _take_slot(self, stop: asyncio.Event) -> bool:
        if not self._slots.locked():
            await self._slots.acquire()
            return True
        taking, stopping = asyncio.create_task(self._slots.acquire()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            taking.cancel()
            stopping.cancel()
        if not stop.is_set():
            return True
        if taking.done():
            self._slots.release()  # both happened at once
        return False

    def _done(self, task: asyncio.Task[bool]) -> None:
        self._under_way.pop(task, None)
        if self._pause and not task.cancelled() and not task.result():
            asyncio.get_running_loop().call_later(self._pause, self._slots.release)
        else:
            self._slots.release()

    async def _send(self, request: LoadRequest, answer: StreamedAnswer, scheduled: float) -> bool:
        """Send one request and read its answer; return whether it was answered. Raises only on cancellation."""
        tally = answer.tally
        try:
            await self._stream(request, answer, scheduled)
        except httpx.HTTPError as error:
            tally.fail(connection_problem(error))
        except AnswerError as error:
            tally.fail(str(error))
        else:
            tally.completed += 1
            if answer.prompt_tokens is not None:
                tally.prompt_tokens += answer.prompt_tokens
                tally.other_prompt += answer.prompt_tokens != len(request.prompt)
            tally.other_output += answer.counted != request.output_tokens
            return True
        return False

    async def _stream(self, request: LoadRequest, answer: StreamedAnswer, scheduled: float) -> None:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = msgspec.json.encode(body)
        answer.tally.send_delay.add(max(0.0, time.perf_counter() - scheduled))
        async with self.client.stream("POST", "/v1/completions", content=content) as response:
            if response.status_code != 200:
                message = message_of(await read_body(response, LARGEST_ERROR))
                raise AnswerError(f"HTTP {response.status_code}: {message or 'no reason given'}")
            async for data in response.aiter_raw():
                answer.feed(data, time.perf_counter())
        answer.end()


async def wait(stop: asyncio.Event, seconds: float) -> bool:
    """Sleep for ``seconds`` unless ``stop`` is set before; return whether it is set."""
    if seconds > 0:
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            return False
    return stop.is_set()
