"""The lines of the GPUs pane: a bar per GPU with who holds it, the matrix of links, concerns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.model import FleetSnapshot
from vllm_console.format import UNKNOWN
from vllm_console.host_words import links_words
from vllm_console.text import plain
from vllm_console.ui.panes.gpu_processes import process_count, process_lines
from vllm_console.ui.theme import BAD, DIM, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, rule
from vllm_console.ui.widgets.lines import line
from vllm_launchers.machine.gpu.concerns import HOT, concerns
from vllm_launchers.machine.gpu.host import Gpu, Host
from vllm_launchers.machine.gpu.matrix import Cell, legend, list_rows, matrix_rows, row_text, row_width
from vllm_launchers.machine.gpu.sharing import holdings, share_words

COLOURS = ("cyan", "green", "blue", "yellow", "bright_cyan", "bright_green", "bright_blue", "bright_yellow")
"""A server's own; magenta means simulated and red means bad."""

OURS, OTHERS, FREE = "█", "▓", "░"
LEAST_BESIDE = 34
"""Columns that bar, figures and names need right of the matrix."""

LEAST_WORDS = 14
_ROLES = {"head": STRONG, "lost": BAD, "nvlink": None, "switch": None, "fact": None}


def wanted_height(host: Host) -> int:
    """Lines that say all there is to say of a machine."""
    listed = process_count(host)
    return (
        len(matrix_rows(host))
        + sum(len(gpu.mig) + len(gpu.claims) for gpu in host.gpus)
        + len(concerns(host))
        + 4
        + (listed + 1 if listed else 0)
    )


def gpus_lines(snapshot: FleetSnapshot, width: int, height: int) -> list[Strip]:
    """Title, a line per GPU with its row of the matrix, then concerns, shares, traffic, processes, legend.

    Processes get the room that all else leaves; what is wrong is told before all that is merely good to know.
    """
    host = snapshot.host
    mark: tuple[Part, ...] = (("recorded host", SIMULATED),) if snapshot.host_recorded else ()
    lines = [rule("6 GPUs", width, mark)]
    if snapshot.host_problem:
        lines += _wrapped(snapshot.host_problem, width, WARN if host and host.gpus else DIM)
    if host is None or not host.gpus:
        return (lines if snapshot.host_problem else [*lines, line((" looking for GPUs …", DIM))])[:height]
    colours = colours_of(snapshot)
    rows = _rows(host, snapshot, width, colours)
    wrong, more = _wrong(host, snapshot, width), _traffic(host, width)
    words = _wrapped(" · ".join(legend(host)), width, DIM)
    room = height - len(lines)
    if len(rows) + len(wrong) > room:
        rows = [row for row in rows if row.cell_length]
    if 0 < room - len(rows) < len(wrong):
        wrong = [*wrong[: room - len(rows) - 1], line((" ! more is wrong: G tells all", WARN))]
    more = [*wrong, *more]
    listed = process_lines(host, snapshot.at, width, room - len(rows) - len(more) - len(words), colours)
    if len(rows) > room:
        rows = [*rows[: max(0, room - 1)], line((f" {len(rows) - room + 1} more lines: make the window taller", DIM))]
    return [*lines, *rows, *more, *listed, *words][:height]


def _rows(host: Host, snapshot: FleetSnapshot, width: int, colours: Mapping[str, Style]) -> list[Strip]:
    """The matrix with bars and figures at its right, or these alone where it is too wide."""
    placed = _placed(snapshot)
    matrix = matrix_rows(host)
    beside = max(map(row_width, matrix)) + 2
    if beside + LEAST_BESIDE > width:
        matrix, beside = [row[:1] for row in matrix if row_text(row)], 5
    columns = _Columns(width - beside)
    strips = []
    for position, row in enumerate(matrix):
        index = row[0].gpu
        gpu = host.gpu(index) if index is not None else None
        parts: list[Part] = [_cell(cell, placed, colours) for cell in row]
        if position and gpu is None:
            strips.append(line())
            continue
        parts.append(" " * (beside - row_width(row)))
        strips.append(line(*parts, *(columns.facts(gpu, colours) if gpu else [(columns.heading, DIM)])))
        if gpu is not None:
            strips += [
                line((fit(f"     {plain(claim.words)}", width), DIM if claim.mine else WARN)) for claim in gpu.claims
            ]
            strips += [_slice(part.profile, part.free_gib, part.memory_gib, part.uuid, width) for part in gpu.mig]
    return strips


class _Columns:
    """What stands right of the matrix, for so many columns."""

    def __init__(self, room: int) -> None:
        self.bar = max(8, min(40, room // 4))
        left = room - self.bar - 12 - LEAST_WORDS
        self.temperature = left >= 5
        self.power = left >= 14
        self.words = room - self.bar - 12 - 5 * self.temperature - 9 * self.power

    @property
    def heading(self) -> str:
        """Titles of the columns."""
        more = (" TEMP" if self.temperature else "") + (f"{'POWER W':>9}" if self.power else "")
        return f"{'MEMORY':<{self.bar}}{'FREE':>6}{'UTIL':>5}{more} HELD, GiB"

    def facts(self, gpu: Gpu, colours: Mapping[str, Style]) -> list[Part]:
        """A GPU's bar, figures and holders."""
        if gpu.lost:
            return [(fit(plain(gpu.lost), self.words + self.bar + 12), BAD)]
        parts = _bar(gpu, self.bar, colours)
        parts.append(f"{_number(gpu.free_gib, '.1f'):>6}{_number(gpu.utilization, '.0f', '%'):>5}")
        if self.temperature:
            hot = WARN if set(HOT) & set(gpu.throttle or ()) else None
            parts.append((f"{_number(gpu.temperature_c, '.0f', 'C'):>5}", hot))
        if self.power:
            limit = f"/{gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
            parts.append(f"{_number(gpu.power_w, '.0f', limit):>9}")
        return [*parts, " ", *_held(gpu, self.words, colours)]


def _bar(gpu: Gpu, width: int, colours: Mapping[str, Style]) -> list[Part]:
    """Our servers, others, free: in this order, to scale."""
    if not gpu.memory_gib or gpu.free_gib is None:
        return [fit(UNKNOWN, width)]
    held = holdings(gpu)
    pieces: list[tuple[str, float, Style | None]] = [
        (OURS, gib, colours.get(name)) for name, gib in sorted(held.ours.items())
    ]
    pieces.append((OTHERS, held.others_gib, None))
    parts: list[Part] = []
    total, drawn = 0.0, 0
    for mark, gib, style in pieces:
        total += gib
        end = min(width, round(total / gpu.memory_gib * width))
        parts.append((mark * (end - drawn), style))
        drawn = end
    return [*parts, (FREE * (width - drawn), DIM)]


def _held(gpu: Gpu, width: int, colours: Mapping[str, Style]) -> list[Part]:
    held = holdings(gpu)
    named: list[tuple[str, float, Style | None]] = [(name, gib, colours.get(name)) for name, gib in held.ours.items()]
    named += [(name.partition(" (")[0], gib, None) for name, gib in held.others.items()]
    named += [("unseen", held.unseen, WARN)] if held.unseen else []
    named.sort(key=lambda one: -one[1])
    parts: list[Part] = []
    for position, (name, gib, style) in enumerate(named):
        text, rest = f"{plain(name)} {gib:.1f}  ", len(named) - position
        if cell_len(text) > width:
            parts.append((fit(text if not position else f"+{rest}", width), style if not position else DIM))
            break
        parts.append((text, style))
        width -= cell_len(text)
    return parts


def _slice(profile: str | None, free: float | None, memory: float | None, uuid: str, width: int) -> Strip:
    size = f"{_number(free, '.1f'):>5} of {_number(memory, '.1f')} GiB free"
    return line((fit(f"     MIG {plain(profile or UNKNOWN):<10} {size}  {plain(uuid)}", width), None))


def _cell(cell: Cell, placed: Mapping[int, str], colours: Mapping[str, Style]) -> Part:
    """A cell of the matrix: in a server's colour where it stands between that server's GPUs."""
    server = placed.get(cell.gpu) if cell.gpu is not None else None
    if server is not None and cell.role != "lost" and (cell.other is None or placed.get(cell.other) == server):
        return cell.text, colours.get(server)
    return cell.text, _ROLES.get(cell.role, DIM)


def colours_of(snapshot: FleetSnapshot) -> dict[str, Style]:
    """Each server that has GPUs, with the colour it is drawn in."""
    names = sorted(set(_placed(snapshot).values()) | _holders(snapshot.host))
    return {name: Style(color=COLOURS[index % len(COLOURS)]) for index, name in enumerate(names)}


def _holders(host: Host | None) -> set[str]:
    return {holder.server for gpu in (host.gpus if host else ()) for holder in gpu.holders if holder.server}


def _placed(snapshot: FleetSnapshot) -> dict[int, str]:
    """Which server of ours is on which GPU: by what it holds, or as it was launched."""
    found = {index: server.name for server in snapshot.servers if server.state.alive for index in server.gpus}
    for gpu in snapshot.host.gpus if snapshot.host else ():
        ours = holdings(gpu).ours
        if ours:
            found[gpu.index] = max(ours, key=lambda name: ours[name])
    return found


def _wrong(host: Host, snapshot: FleetSnapshot, width: int) -> list[Strip]:
    """What is the matter with GPUs, and what may be taken of them."""
    lines = []
    for text in concerns(host):
        lines += _wrapped(f"! {_short(text, host)}", width, WARN)
    for gpu in host.gpus:
        if text := share_words(gpu, snapshot.gpu_shares):
            lines += _wrapped(text, width, None)
    return lines


def _short(text: str, host: Host) -> str:
    """Without the models' names, which the title says already."""
    found = next((gpu for gpu in host.gpus if text.startswith(gpu.label)), None)
    return f"GPU {found.index}{text.removeprefix(found.label)}" if found is not None else text


def _traffic(host: Host, width: int) -> list[Strip]:
    lines = []
    if traffic := [
        f"{gpu.index} ↑{_number(gpu.nvlink_sent_gbs, '.1f')} ↓{_number(gpu.nvlink_received_gbs, '.1f')}"
        for gpu in host.gpus
        if gpu.nvlink_sent_gbs is not None or gpu.nvlink_received_gbs is not None
    ]:
        lines += _wrapped(f"NVLink GB/s  {'  '.join(traffic)}", width, None)
    if words := links_words(host):
        lines += _wrapped(f"NVLinks      {words}", width, None)
    if max(map(row_width, matrix_rows(host))) + 2 + LEAST_BESIDE > width:
        lines += [line((f" {fit(plain(row_text(row)), width - 1)}", None)) for row in list_rows(host)]
    return lines


def _number(value: float | None, how: str, unit: str = "") -> str:
    return UNKNOWN if value is None else format(value, how) + unit


def _wrapped(text: str, width: int, style: Style | None) -> list[Strip]:
    return [line((f" {row}", style)) for row in textwrap.wrap(plain(text), max(20, width - 1))]
