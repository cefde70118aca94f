"""Secrets taken out of a server's output before it is written down: vLLM logs its arguments, and echoes what it got.

Values that the keeper knows are found wherever they stand, also where two reads cut them in two; what merely looks
like a key is found line by line (`vllm_launchers.secrets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_launchers.secrets import HIDDEN, is_secret_name, may_hold_secret, redact

SHORTEST_OWN = 4
"""A shorter one of the server's own secrets is left: hiding every ``1`` would spoil the log and give it away."""
SHORTEST_AROUND = 8
"""The same for what the surrounding environment holds besides: ``MY_KEY=enabled`` is no secret worth a word."""
LONGEST_LINE = 1 << 16


def values_of(secrets: Mapping[str, str], environment: Mapping[str, str]) -> set[str]:
    """The values to be hidden: the server's secrets, and what it inherits under a secret's name."""
    own = {value for value in secrets.values() if len(value) >= SHORTEST_OWN}
    return own | {
        value for name, value in environment.items() if len(value) >= SHORTEST_AROUND and is_secret_name(name)
    }


class Blanking:
    """Bytes in, bytes without secrets out. One thread reads and cleans; others may tell it of further secrets."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: tuple[bytes, ...] = ()
        self.know(values)

    def know(self, values: Iterable[str]) -> None:
        """Hide these too from now on. Those known before stay: the server that had them may still be writing."""
        parts = {part for value in values for part in value.encode(errors="surrogateescape").splitlines()}
        known = {part for part in parts if len(part) >= SHORTEST_OWN} | set(self._values)
        self._values = tuple(sorted(known, key=len, reverse=True))

    def clean(self, data: bytes, *, whole: bool = False) -> tuple[bytes, int]:
        """What of the output may be written, and how many bytes of ``data`` that came from.

        The rest may be the beginning of a secret: it is to be handed in again with what follows; ``whole``: nothing
        does.
        """
        shown = data
        for value in self._values:
            if value in shown:
                shown = shown.replace(value, HIDDEN.encode())
        keep = 0 if whole else self._begun(shown)
        used, shown = len(data) - keep, shown[: len(shown) - keep]
        # One character for one byte: it is only looked at.
        if not may_hold_secret(shown.decode("latin-1")):
            return shown, used
        lines = shown.splitlines(keepends=True)
        last = lines[-1]
        if (
            not whole
            and not last.endswith((b"\n", b"\r"))
            and len(last) < LONGEST_LINE
            and may_hold_secret(last.decode("latin-1"))
        ):
            lines.pop()
            used = max(data.rfind(b"\n", 0, used), data.rfind(b"\r", 0, used)) + 1
        return b"".join(map(_redacted, lines)), used

    def _begun(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of a known secret."""
        longest = 0
        for value in self._values:
            tail = data[-(len(value) - 1) :]
            at = tail.find(value[:1])
            while at >= 0 and not value.startswith(tail[at:]):
                at = tail.find(value[:1], at + 1)
            if at >= 0:
                longest = max(longest, len(tail) - at)
        return longest


def _redacted(line: bytes) -> bytes:
    text = line.decode(errors="surrogateescape")
    shown = redact(text)
    return line if shown == text else shown.encode(errors="surrogateescape")
