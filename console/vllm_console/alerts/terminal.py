"""What rings a terminal: the bell, OSC 9 and OSC 777, as bytes. Pure: somebody else writes them.

Text is reduced to printable ASCII first, so that nothing from outside can end the sequence or begin another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from vllm_console.alerts.findings import Event, Told, gravest
from vllm_console.diagnosis.titles import title_of_code
from vllm_console.text import plain

ESC, BEL = "\x1b", "\x07"
TITLE = "vllm-console"
LONGEST = 160
"""Of a message: what desktops show of it."""

RING_EVERY_SECONDS = 10.0
"""What begins or ends in between is told together."""


class Way(StrEnum):
    """How a terminal may be told."""

    BELL = "bell"
    OSC9 = "osc9"
    """A desktop notification in iTerm2, WezTerm, Ghostty, kitty, Windows Terminal."""
    OSC777 = "osc777"
    """The same in foot, urxvt, WezTerm, Ghostty, VTE."""


def ring(text: str, ways: Collection[Way], environ: Mapping[str, str]) -> bytes:
    """What to write to the terminal for a message. Inside tmux the sequences pass through it, the bell is its own."""
    body = _safe(text)
    sequences = []
    if Way.OSC9 in ways:
        sequences.append(f"{ESC}]9;{TITLE}: {body}{BEL}")
    if Way.OSC777 in ways:
        sequences.append(f"{ESC}]777;notify;{TITLE};{body.replace(';', ',')}{BEL}")
    if environ.get("TMUX"):
        sequences = [f"{ESC}Ptmux;{sequence.replace(ESC, ESC * 2)}{ESC}\\" for sequence in sequences]
    if Way.BELL in ways:
        sequences.append(BEL)
    return "".join(sequences).encode("ascii")


def _safe(text: str) -> str:
    shown = "".join(c if " " <= c <= "~" else "?" for c in plain(text).replace("–", "-").replace("×", "x"))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


def message(told: Sequence[Told]) -> str:
    """Several findings in one line: the gravest, and how many others."""
    first = gravest(told)
    if first is None:
        return ""
    condition = first.finding.condition
    title = f"{first.finding.server}: {title_of_code(condition.code)}"
    words = f"{title} is over" if first.event is Event.ENDED else f"{title} ({condition.severity})"
    return words if len(told) == 1 else f"{words}, and {len(told) - 1} more"


class Ringer:
    """Rings seldom: what comes while it is quiet is told together when that is over."""

    def __init__(self, ways: Collection[Way], environ: Mapping[str, str]) -> None:
        self._ways, self._environ = frozenset(ways), environ
        self._waiting: list[Told] = []
        self._rang_at = float("-inf")

    def take(self, told: Sequence[Told], now: float) -> bytes:
        """What to write now (``now`` from any clock that only goes on); nothing where nothing is wanted or due."""
        if not self._ways:
            return b""
        self._waiting += told
        if not self._waiting or now - self._rang_at < RING_EVERY_SECONDS:
            return b""
        text, self._waiting = message(self._waiting), []
        self._rang_at = now
        return ring(text, self._ways, self._environ)
