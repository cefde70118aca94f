"""What stands on the board, as values and as the text of one person's file. Standard library only.

A person's file is JSON: ``{"version": 1, "claims": [...], "servers": [...]}``, times as UTC (``2026-01-01T12:41:07Z``).
Whose it is stands nowhere in it: that is who owns the file. What others wrote is checked value by value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

VERSION = 1
MOST_BYTES = 256 * 1024
"""A person's file larger than this is not read."""

MOST_ENTRIES = 32
"""Claims, or servers, that one person may have on the board; as many fit into a file, whatever they say."""

MOST_GPUS = 64
LAST_GPU = 9999
MOST_TEXT = 200
SKEW_SECONDS = 300.0
"""So far ahead of this clock an entry may have begun: clocks are set back now and then."""

LONGEST_SECONDS = 14 * 86_400.0
"""No claim holds for longer."""


class BoardError(Exception):
    """The board cannot be used as asked; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Claim:
    """GPUs that a person says are taken, until when (Unix seconds) and why. A word, no lock."""

    gpus: tuple[int, ...]
    since: float
    until: float
    why: str = ""
    uid: int = -1
    user: str = ""


@dataclass(frozen=True, slots=True)
class Announced:
    """A server that a person says they run. ``pid`` and ``start_time`` (clock ticks since boot) are its keeper's, which
    lives as long as the server is up or will be restarted. ``seen`` is whether that process is there and theirs, None
    where this person may not see others' processes. ``open``: others can use it, it listens without an API key.
    """

    name: str
    preset: str
    model: str
    engine: str
    gpus: tuple[int, ...]
    port: int
    since: float
    pid: int
    start_time: int
    uid: int = -1
    user: str = ""
    seen: bool | None = True
    open: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """What one person has on the board."""

    claims: tuple[Claim, ...] = ()
    servers: tuple[Announced, ...] = ()


@dataclass(frozen=True, slots=True)
class Board:
    """All that holds at one moment (``at``, Unix seconds), earliest claims first; ``notices`` are what was left aside,
    and what is wrong with the folder, one sentence each. ``unsafe`` is why nothing is written to it; empty when all is
    well.
    """

    folder: Path
    at: float
    claims: tuple[Claim, ...] = ()
    servers: tuple[Announced, ...] = ()
    notices: tuple[str, ...] = field(default=())
    unsafe: str = ""


def dump(page: Page) -> bytes:
    """A page as its file's text."""
    claims = [
        {"gpus": list(one.gpus), "since": utc(one.since), "until": utc(one.until), "why": shown(one.why)}
        for one in page.claims
    ]
    servers = [
        {
            "name": shown(one.name),
            "preset": shown(one.preset),
            "model": shown(one.model),
            "engine": shown(one.engine),
            "gpus": list(one.gpus),
            "port": one.port,
            "since": utc(one.since),
            "pid": one.pid,
            "start_time": one.start_time,
            "open": one.open,
        }
        for one in page.servers
    ]
    return (json.dumps({"version": VERSION, "claims": claims, "servers": servers}, indent=1) + "\n").encode()


def parse(data: bytes, now: float) -> tuple[Page, list[str]]:
    """A person's file as far as it holds at ``now``, and why parts of it were left aside; what expired is none.

    Raises:
        BoardError: it is no such file at all.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BoardError("is no JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("version"), int):
        raise BoardError("is no page of the board")
    if document["version"] > VERSION:
        raise BoardError("was written by a newer vllm-console")
    problems: list[str] = []
    claims = _each(document, "claims", lambda one: _claim(one, now), problems)
    servers = _each(document, "servers", lambda one: _server(one, now), problems)
    return Page(tuple(one for one in claims if one.until > now), tuple(servers)), problems


def utc(at: float) -> str:
    """Unix seconds as they are written down."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def till_words(until: float, now: float) -> str:
    """When something ends, on this person's clock: ``18:00``, ``Mon 18:00`` within a week, else with the date."""
    there, here = time.localtime(until), time.localtime(now)
    if there[:3] == here[:3]:
        return time.strftime("%H:%M", there)
    return time.strftime("%a %H:%M" if until - now < 6 * 86_400 else "%Y-%m-%d %H:%M", there)


def claim_words(claim: Claim, now: float, *, mine: bool = False) -> str:
    """``taken till 18:00 by anna: training``."""
    why = f": {claim.why}" if claim.why else ""
    return f"taken till {till_words(claim.until, now)} by {'you' if mine else claim.user}{why}"


def shown(text: str) -> str:
    """Text of others without what a terminal would obey, in one line of bounded length."""
    return "".join(c if c.isprintable() else " " for c in text[: MOST_TEXT * 4])[:MOST_TEXT].strip()


class _BadError(Exception):
    """An entry that says what cannot be."""


def _each(
    document: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any]], T], problems: list[str]
) -> list[T]:
    entries = document.get(name, [])
    if not isinstance(entries, list):
        problems.append(f"its {name} are no list")
        return []
    found = []
    for number, entry in enumerate(entries[:MOST_ENTRIES], 1):
        try:
            if not isinstance(entry, dict):
                raise _BadError("is none")
            found.append(read(entry))
        except _BadError as error:
            problems.append(f"number {number} of its {name} {error}")
    if len(entries) > MOST_ENTRIES:
        problems.append(f"of its {len(entries)} {name} {MOST_ENTRIES} are read")
    return found


def _claim(entry: Mapping[str, Any], now: float) -> Claim:
    gpus, since, until = _gpus(entry), _time(entry, "since"), _time(entry, "until")
    if not gpus:
        raise _BadError("names no GPU")
    if since > now + SKEW_SECONDS:
        raise _BadError("begins in the future")
    if until > now + LONGEST_SECONDS + SKEW_SECONDS:
        raise _BadError(f"holds for longer than {LONGEST_SECONDS / 86_400:.0f} days")
    return Claim(gpus, since, until, shown(_text(entry, "why")))


def _server(entry: Mapping[str, Any], now: float) -> Announced:
    since = _time(entry, "since")
    if since > now + SKEW_SECONDS:
        raise _BadError("begins in the future")
    name = shown(_text(entry, "name"))
    if not name:
        raise _BadError("has no name")
    return Announced(
        name,
        shown(_text(entry, "preset")),
        shown(_text(entry, "model")),
        shown(_text(entry, "engine")),
        _gpus(entry),
        _number(entry, "port", 65_535),
        since,
        _number(entry, "pid", 1 << 31),
        _number(entry, "start_time", 1 << 63),
        open=entry.get("open") is True,
    )


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise _BadError(f"has no text as its {key}")
    return value


def _number(entry: Mapping[str, Any], key: str, most: int) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _BadError(f"has no number as its {key}")
    return value


def _gpus(entry: Mapping[str, Any]) -> tuple[int, ...]:
    value = entry.get("gpus")
    if not isinstance(value, list) or len(value) > MOST_GPUS:
        raise _BadError("has no list of GPUs")
    return tuple(sorted({_number({"gpus": one}, "gpus", LAST_GPU) for one in value}))


def _time(entry: Mapping[str, Any], key: str) -> float:
    text = _text(entry, key)
    try:
        if not text.endswith("Z"):
            raise ValueError(text)
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise _BadError(f"has no time (UTC) as its {key}") from error


def gpus_text(gpus: Sequence[int]) -> str:
    """``GPU 2``, ``GPU 0,1``."""
    return f"GPU {','.join(map(str, gpus))}"
