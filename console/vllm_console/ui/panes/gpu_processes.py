"""The processes on the GPUs, one line each: whose they are, what they hold, for how long. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.style import Style
from textual.strip import Strip

from vllm_console.format import UNKNOWN, duration
from vllm_console.text import plain
from vllm_console.ui.theme import DIM
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.lines import line
from vllm_launchers.machine.gpu.host import Gpu, Holder, Host

LEAST_ROOM = 2
"""Lines below which there is no point in a list: its heading and one process."""

_GPU, _PID, _WHO, _GIB, _FOR = 4, 9, 14, 7, 8


def process_count(host: Host) -> int:
    """How many lines all processes take."""
    return sum(len(gpu.holders) for gpu in host.gpus)


def process_lines(host: Host, now: float, width: int, room: int, colours: Mapping[str, Style]) -> list[Strip]:
    """At most ``room`` lines: a heading, the processes GPU by GPU with the largest first, and how many are left out.

    ``now`` (Unix seconds) is when the host was looked at, where it does not say so itself.
    """
    found = [(gpu, holder) for gpu in host.gpus for holder in sorted(gpu.holders, key=lambda h: -(h.gib or 0.0))]
    if not found or room < LEAST_ROOM:
        return []
    heading = f"{'GPU':>{_GPU}}{'PID':>{_PID}} {'WHOSE':<{_WHO}}{'GiB':>{_GIB}}{'FOR':>{_FOR}} COMMAND"
    shown = found if len(found) < room else found[: room - 2]
    at = host.at if host.at is not None else now
    lines = [line((fit(heading, width), DIM)), *(_process(*one, at, width, colours) for one in shown)]
    if left := len(found) - len(shown):
        lines.append(line((fit(f" {left} more process{'' if left == 1 else 'es'}: G lists all", width), DIM)))
    return lines


def _process(gpu: Gpu, holder: Holder, at: float, width: int, colours: Mapping[str, Style]) -> Strip:
    name = plain(holder.server or holder.user or "not seen")
    size = UNKNOWN if holder.gib is None else f"{holder.gib:.1f}"
    age = UNKNOWN if holder.started_at is None else duration(at - holder.started_at)
    where = f"{gpu.index}/{holder.instance}" if holder.instance is not None else str(gpu.index)
    hidden = not holder.seen and not holder.server
    command = plain(holder.command or ("in a container, or ended" if hidden else UNKNOWN))
    words: Sequence[str | tuple[str, Style | None]] = (
        f"{where:>{_GPU}}{holder.pid:>{_PID}} ",
        (fit(f"{name} (yours)" if holder.server and len(name) < _WHO - 8 else name, _WHO - 1) + " ",
         colours.get(holder.server) if holder.server else None),
        f"{size:>{_GIB}}{age:>{_FOR}} ",
        (fit(command, max(0, width - _GPU - _PID - _WHO - _GIB - _FOR - 2)).rstrip(), None),
    )  # fmt: skip
    return line(*words).crop(0, width)
