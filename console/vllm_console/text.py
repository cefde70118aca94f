"""Text and numbers for display: sanitized and bounded external text, numbers with units; parsing of durations."""

from __future__ import annotations

import re
import time
import unicodedata
from typing import TYPE_CHECKING

from vllm_launchers.patterns import lazy_pattern

if TYPE_CHECKING:
    from vllm_launchers.presets.model import Objectives

_ESCAPES = (
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"  # OSC
    r"|\x1b[PX^_][^\x1b\x9c]*(?:\x1b\\|\x9c|$)"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]"  # the same, written with one C1 character
    r"|\x9d[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|[\x90\x98\x9e\x9f][^\x1b\x9c]*(?:\x1b\\|\x9c|$)"
)
"""Compiled by `re` at first use: most commands never need it."""

_FIRST_MARK = "\u0300"
"""The first combining mark; no character before it is drawn over the previous one."""

WITHOUT_MARKS = lazy_pattern(r"[ -~\u00a1-\u00ac\u00ae-\u02ff\u2010-\u2027\u2030-\u205e\u2190-\u28ff]*")
"""Text without combining marks: Latin characters, punctuation, arrows, lines, blocks and dots of charts."""

MOST_MARKS = 4
"""Maximum number of marks per letter: no language uses more, and stacked ones would cover adjacent lines."""


def plain(text: str, limit: int = 2000) -> str:
    """Return ``text`` as one line that a terminal shows unchanged.

    Escape sequences and invisible characters (controls, bidirectional overrides, zero-width and tag characters, lone
    surrogates) are removed, other white space becomes spaces, stacked accents are limited, and the result is cut to
    ``limit`` characters.
    """
    if text.isprintable() and len(text) <= limit and (text.isascii() or WITHOUT_MARKS.fullmatch(text)):
        return text
    text = text[: limit * 8]
    text = re.sub(_ESCAPES, "", text).rstrip("\r\n").replace("\t", "    ")
    if not text.isprintable():
        text = "".join(map(_seen, text))
    if not text.isascii():
        text = _with_few_marks(text)
    return text[:limit]


def printed(text: str) -> str:
    """``text`` as a terminal shows it unchanged: like `plain`, but line ends and tabs stay, and nothing is cut."""
    return "\n".join("\t".join(plain(part, max(1, len(part))) for part in row.split("\t")) for row in text.split("\n"))


def redrawn(line: str) -> str:
    """The final state of a log line that was redrawn with ``\\r`` (as by tqdm).

    For log lines only: a name that erases the text before it could impersonate our output.
    """
    return line.rstrip("\r\n").rpartition("\r")[2]


def _seen(character: str) -> str:
    """The character, a space for other white space, or nothing for an invisible one."""
    if character.isprintable():
        return character
    return " " if character.isspace() else ""


def _with_few_marks(text: str) -> str:
    """The text without excess combining marks (accents, and other signs drawn onto a letter)."""
    kept, marks = [], 0
    for character in text:
        is_mark = character >= _FIRST_MARK and unicodedata.category(character) in ("Mn", "Me")
        marks = marks + 1 if is_mark else 0
        if marks <= MOST_MARKS:
            kept.append(character)
    return "".join(kept)


# -- numbers and durations, formatted; unknown is an en dash ----------------------------------------------------------
#
# One format per kind, on every screen and in every command: ``24ms``, ``7m12s``, ``6.9 req/s``, ``71°C``, ``1.2 GiB``,
# ``Nov 22 12:03``. JSON has plain numbers; text for programs (log lines, alerts) has ISO dates.


UNKNOWN = "–"


def seconds(value: float | None) -> str:
    """A latency: ``850µs``, ``6.8ms``, ``24ms``, ``1.9s``, ``12s``; above 100 seconds like `duration`: ``2m05s``."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0s"
    if value < 0.0009995:
        return f"{value * 1e6:.0f}µs"
    if value < 0.9995:
        return f"{value * 1000:.1f}ms" if value < 0.00995 else f"{value * 1000:.0f}ms"
    if value >= 100.5:
        return duration(round(value))
    return f"{value:.1f}s" if value < 9.95 else f"{value:.0f}s"


def seconds_range(low: float, high: float) -> str:
    """Two latencies, with a common unit if possible: ``361–460ms``, ``0.9–1.4s``, ``9.0ms–1.4s``."""
    ends = seconds(low), seconds(high)
    if ends[0] == ends[1]:
        return ends[1]
    if 0.1 <= low < 1 <= high:
        ends = f"{low:.1f}s", ends[1]
    if high >= 100.5:
        return "–".join(ends)
    unit = next((unit for unit in ("µs", "ms", "s") if ends[1].endswith(unit)), "")
    same = ends[0].endswith(unit) and ends[0].removesuffix(unit).replace(".", "").isdigit()
    return f"{ends[0].removesuffix(unit) if same else ends[0]}–{ends[1]}"


def count(value: float | None) -> str:
    """A count: ``7``, ``2,055``, ``21.4k``, ``1.3M``."""
    if value is None:
        return UNKNOWN
    for limit, divisor, unit in ((999_500_000, 1e9, "G"), (999_500, 1e6, "M"), (9999.5, 1e3, "k")):
        if abs(value) >= limit:
            scaled = value / divisor
            return f"{scaled:.1f}{unit}" if abs(scaled) < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:,.0f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share from 0 to 1 as a percentage."""
    return UNKNOWN if value is None else f"{value * 100:.{digits}f}%"


def objectives_text(limits: Objectives) -> str:
    """A preset's objectives: ``TTFT p99 ≤ 1.0s, ITL p99 ≤ 100ms, KV cache ≤ 85%, preemptions ≤ 0.02/request``."""
    return (
        f"TTFT p99 ≤ {seconds(limits.ttft_p99_seconds)}, ITL p99 ≤ {seconds(limits.itl_p99_seconds)}, "
        f"KV cache ≤ {percent(limits.kv_cache_usage)}, preemptions ≤ {limits.preemption_rate:g}/request"
    )


def figure(value: float | None, digits: int = 0, unit: str = "") -> str:
    """A number with ``digits`` decimals: ``26``, ``97%``."""
    return UNKNOWN if value is None else f"{value:.{digits}f}{unit}"


def gib(value: float | None) -> str:
    """Memory in GiB: ``23.6 GiB``."""
    return figure(value, 1, " GiB")


def duration(value: float | None) -> str:
    """A duration: ``42s``, ``7m12s``, ``2h10m``, ``3d4h``."""
    if value is None:
        return UNKNOWN
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24}h"


def round_duration(value: float) -> str:
    """A round duration in one unit: ``5s``, ``15m``, ``6h``; no seconds from a minute on."""
    whole = round(value) if value < 60 else round(value / 60) * 60
    for seconds, unit in ((3600, "h"), (60, "m")):
        if whole >= seconds and whole % seconds == 0:
            return f"{whole // seconds}{unit}"
    return f"{whole}s"


_DURATION = lazy_pattern(
    r"\d+(\.\d+)?|(?=\d)" + "".join(rf"(\d+(\.\d+)?{unit})?" for unit in ("d", "h", "m(in)?", "s")), re.ASCII
)
_PART = lazy_pattern(r"([\d.]+)([dhms]?)", re.ASCII)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_from(text: str) -> float | None:
    """Parse a duration in seconds: ``25``, ``25s``, ``0.5s``, ``2m``, ``1h30m``, ``1d``; None if invalid."""
    if len(text) > 40 or not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def took(value: float | None) -> str:
    """How long something took: like `duration`, with tenths below ten seconds (``4.0s``)."""
    return f"{value:.1f}s" if value is not None and value < 10 else duration(value)


def amount(value: float | None) -> str:
    """A quantity that may be fractional: ``0.25``, ``6.9``, ``21.4k``."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if 1 <= value < 10 else f"{value:.2g}" if 0 < value < 1 else count(value)


def rate(value: float | None, what: str) -> str:
    """A rate: ``6.9 req/s``, ``21.4k tok/s``."""
    return f"{amount(value)} {what}/s"


def temperature(value: float | None) -> str:
    """Degrees Celsius: ``71°C``."""
    return UNKNOWN if value is None else f"{value:.0f}°C"


def size(number: float | None) -> str:
    """Bytes: ``15.0 GiB``, ``812 MiB``, ``144 KiB``; one decimal for GiB, and below ten of a smaller unit."""
    if number is None:
        return UNKNOWN
    for divisor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        scaled = number / divisor
        if scaled * 1024 >= 1023.5:
            tenths = f"{scaled:.1f}" if unit == "GiB" else f"{scaled:.1f}".removesuffix(".0")
            return f"{tenths if unit == 'GiB' or scaled < 10 else f'{scaled:.0f}'} {unit}"
    return f"{number:.0f} B"


def clock(at: float, now: float, *, seconds: bool = False) -> str:
    """A time (Unix seconds) as local time of day, ``12:03``; with the date if it is not on the day of ``now``."""
    then = time.localtime(at)
    same = then[:3] == time.localtime(now)[:3]
    return time.strftime(("" if same else "%b %d ") + ("%H:%M:%S" if seconds else "%H:%M"), then)


def shortened(text: str) -> list[str]:
    """A text, then progressively shorter versions of whole sentences and clauses from its beginning."""
    whole = plain(text)
    parts = [part for part in re.split(r"(?<=[.;]) ", whole) if part]
    shorter = [" ".join(parts[:count]).rstrip(".;") + "." for count in range(len(parts) - 1, 0, -1)]
    return [whole, *shorter]


def sourced(source: str, reason: str) -> str:
    """A reason with its source, unless it names that itself: ``preset: …``, ``set by you``."""
    return reason if not source or reason.endswith(f" by {source}") else f"{source}: {reason}"


def error_sentence(error: BaseException) -> str:
    """The first line of an error, or its type name if it has no text."""
    first = str(error).strip().splitlines()[:1]
    return plain(first[0]) if first else type(error).__name__
