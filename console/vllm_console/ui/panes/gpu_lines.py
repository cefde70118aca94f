"""The lines of the GPUs pane: a bar per GPU with its holders, the link matrix, warnings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.host_text import format_links
from vllm_console.text import UNKNOWN, clock, duration, figure, plain, temperature
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import clickable, clickable_line, line
from vllm_console.ui.theme import BAD, DIM, KEY, PAST, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, paragraph, rule, side_by_side
from vllm_launchers.host.gpu.hardware_warnings import HOT, hardware_warnings
from vllm_launchers.host.gpu.host import Gpu, Holder, Host
from vllm_launchers.host.gpu.sharing import format_share, holdings
from vllm_launchers.host.gpu.topology import (
    Cell,
    legend,
    links_summary,
    list_rows,
    matrix_rows,
    row_text,
    row_width,
    spans,
)

COLORS = ("cyan", "green", "blue", "yellow", "bright_cyan", "bright_green", "bright_blue", "bright_yellow")
"""Colors of servers; magenta means simulated, and red means bad."""

OURS, OTHERS, FREE = "█", "╳", "·"
LEAST_BESIDE = 34
"""Columns needed to the right of the matrix for bar, figures and names."""

_FIGURES = len(" FREE GiB UTIL ")
"""Cells of the free memory and the utilization, and the blank after them."""

LEAST_WORDS = 14
LEAST_ROOM = 3
"""Minimum lines for a list of several processes: its heading, one process, and the number left out."""

PROCESS_ROOM = 5
"""Lines reserved for processes before traffic and the legend get any."""

_GPU, _PID, _WHO, _GIB, _AGE = 4, 9, 14, 7, 8
_WHO_WIDE, _BESIDE_WHO = 24, 60
YOURS = " (yours)"

TWO_COLUMNS = 150
"""Minimum width to show processes next to the GPUs."""
_ROLES = {"head": STRONG, "lost": BAD, "nvlink": None, "switch": None, "fact": None}


def wanted_height(host: Host, width: int) -> int:
    """The lines needed to show everything about a machine at this width."""
    listed = process_count(host)
    about = (
        (len(host.gpus) + 1 if links_summary(host) is not None else len(matrix_rows(host)))
        + sum(len(gpu.mig) + len(gpu.claims) for gpu in host.gpus)
        + len(hardware_warnings(host))
        + 5
    )
    processes = listed + 1 if listed else 0
    return max(about, processes + 1) if width >= TWO_COLUMNS else about + processes


def gpus_lines(snapshot: FleetSnapshot, width: int, height: int, moment: float | None = None) -> list[Strip]:
    """Title, a line per GPU, how they are linked, then warnings, shares, traffic, processes, legend.

    ``moment`` (Unix seconds) is the earlier moment that the screen shows; the title then says that these are the GPUs
    now.

    Links that a short summary describes have no matrix; the summary is in the title if it fits. Traffic and legend give
    way to processes, and processes to everything else. Problems come before other information.
    """
    host = snapshot.host
    title = _title(snapshot.at, moment)
    marks = _title_marks(snapshot, width, title)
    lines = [clickable_line(_title_line(title, width, marks, moment), "screen.pane(6)")]
    if snapshot.host_problem:
        lines += paragraph(snapshot.host_problem, width, WARN if host and host.gpus else DIM)
    if host is None or not host.gpus:
        return (lines if snapshot.host_problem else [*lines, line((" looking for GPUs…", DIM))])[:height]
    room, named = height - len(lines), _in_title(host, width, title)
    if width < TWO_COLUMNS or not process_count(host):
        return [*lines, *_about(host, snapshot, width, room, named, listed=True)][:height]
    column = (width - 1) // 2
    left = _about(host, snapshot, column, room, named, listed=False)
    right = process_lines(host, snapshot.at, column, room, colors_of(snapshot))
    return [*lines, *side_by_side((left, right), column, min(room, max(len(left), len(right))))]


def _about(host: Host, snapshot: FleetSnapshot, width: int, room: int, named: bool, *, listed: bool) -> list[Strip]:
    """Everything below the title, in at most ``room`` lines.

    ``named``: the title says how the GPUs are linked. ``listed``: list processes here.
    """
    colors = colors_of(snapshot)
    rows = _rows(host, snapshot, width, colors)
    wrong, links, more = _wrong(host, snapshot, width), _links(host, width, named), _traffic(host, width)
    words = _legend(host, width)
    if len(rows) + len(wrong) + len(links) > room:
        links = []
    if len(rows) + len(wrong) > room:
        rows = [row for row in rows if row.cell_length]
    if 0 < room - len(rows) < len(wrong):
        wrong = [*wrong[: room - len(rows) - 1], line((f" ! more problems: {key_of('describe_gpus')} shows all", WARN))]
    left = room - len(rows) - len(wrong) - len(links)
    wanted = min(process_count(host) + 1, PROCESS_ROOM) if listed and process_count(host) else 0
    for lesser in (words, more):
        if left - len(words) - len(more) < wanted:
            lesser.clear()
    more = [*links, *wrong, *more]
    left = room - len(rows) - len(more) - len(words)
    processes = process_lines(host, snapshot.at, width, left, colors) if listed else []
    if len(rows) > room:
        rows = [*rows[: max(0, room - 1)], line((f" {len(rows) - room + 1} more lines: enlarge the window", DIM))]
    return [*rows, *more, *processes, *words][:room]


def _title(now: float, moment: float | None) -> str:
    return "GPUs" if moment is None else f"GPUs now, not at {clock(moment, now, seconds=True)}"


def _title_line(title: str, width: int, marks: Sequence[Part], moment: float | None) -> Strip:
    return rule(title, width, marks, style=STRONG if moment is None else PAST, key=key_of("pane_6"))


def _title_marks(snapshot: FleetSnapshot, width: int, title: str) -> list[Part]:
    """How the GPUs are linked, the mark of a recorded host, and the charts key, as far as they fit."""
    host = snapshot.host
    links = plain(links_summary(host) or "") if host is not None and _in_title(host, width, title) else ""
    words = [(links, DIM)] if links else []
    words += [("recorded host", SIMULATED)] if snapshot.host_recorded else []
    marks: list[Part] = [part for word in words for part in (word, (" · ", DIM))]
    length = sum(cell_len(text) + 3 for text, _ in words)
    key = key_of("gpu_history")
    if host is not None and host.gpus and length + len(f"{key} charts") + 8 < width - len(title) - 2:
        return [*marks, (key, clickable("screen.gpu_history", KEY)), (" charts", DIM)]
    return marks[:-1]


def _in_title(host: Host, width: int, title: str) -> bool:
    """Whether the title has room for the link summary next to the mark of a recorded host and the charts key."""
    summary = links_summary(host)
    more = len(f" · recorded host · {key_of('gpu_history')} charts")
    return bool(summary) and len(summary or "") + more + 8 < width - len(title) - 2


def _rows(host: Host, snapshot: FleetSnapshot, width: int, colors: Mapping[str, Style]) -> list[Strip]:
    """The matrix with bars and figures at its right, or these alone if it is too wide or a summary replaces it."""
    placed = _placed(snapshot)
    matrix = matrix_rows(host)
    beside = max(map(row_width, matrix)) + 2
    if links_summary(host) is not None:
        by_index = sorted((row[0] for row in matrix if row[0].gpu is not None), key=lambda cell: cell.gpu or 0)
        matrix, beside = [matrix[0][:1], *((cell,) for cell in by_index)], 5
    elif beside + LEAST_BESIDE > width:
        matrix, beside = [row[:1] for row in matrix if row_text(row)], 5
    columns = _Columns(width - beside)
    strips = []
    for position, row in enumerate(matrix):
        index = row[0].gpu
        gpu = host.gpu(index) if index is not None else None
        parts: list[Part] = [_cell(cell, placed, colors) for cell in row]
        if position and gpu is None:
            strips.append(line())
            continue
        parts.append(" " * (beside - row_width(row)))
        strips.append(line(*parts, *(columns.facts(gpu, colors) if gpu else [(columns.heading, DIM)])))
        if gpu is not None:
            strips += [
                line((fit(f"     {plain(claim.words)}", width), DIM if claim.mine else WARN)) for claim in gpu.claims
            ]
            strips += [_slice(part.profile, part.free_gib, part.memory_gib, part.uuid, width) for part in gpu.mig]
    return strips


class _Columns:
    """The columns to the right of the matrix, for ``room`` cells."""

    def __init__(self, room: int) -> None:
        self.bar = max(8, min(40, room // 4))
        left = room - self.bar - _FIGURES - LEAST_WORDS
        self.temperature = left >= 5
        self.power = left >= 14
        self.words = room - self.bar - _FIGURES - 5 * self.temperature - 9 * self.power

    @property
    def heading(self) -> str:
        more = (" TEMP" if self.temperature else "") + (f"{'POWER W':>9}" if self.power else "")
        legend = f"{OURS} yours {OTHERS} others {FREE} free"
        return (
            f"{legend if len(legend) <= self.bar else 'MEMORY':<{self.bar}}{'FREE GiB':>9}{'UTIL':>5}{more} HELD, GiB"
        )

    def facts(self, gpu: Gpu, colors: Mapping[str, Style]) -> list[Part]:
        """A GPU's bar, figures and holders."""
        if gpu.lost:
            return [(fit(plain(gpu.lost), self.words + self.bar + _FIGURES), BAD)]
        parts = _bar(gpu, self.bar, colors)
        parts.append(f"{figure(gpu.free_gib, 1):>9}{figure(gpu.utilization, 0, '%'):>5}")
        if self.temperature:
            hot = WARN if set(HOT) & set(gpu.throttle or ()) else None
            parts.append((f"{temperature(gpu.temperature_c):>5}", hot))
        if self.power:
            limit = f"/{gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
            parts.append(f"{figure(gpu.power_w, 0, limit):>9}")
        return [*parts, " ", *_held(gpu, self.words, colors)]


def _bar(gpu: Gpu, width: int, colors: Mapping[str, Style]) -> list[Part]:
    """Our servers, others, free, in this order and to scale."""
    if not gpu.memory_gib or gpu.free_gib is None:
        return [fit(UNKNOWN, width)]
    held = holdings(gpu)
    pieces: list[tuple[str, float, Style | None]] = [
        (OURS, gib, colors.get(name)) for name, gib in sorted(held.ours.items())
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


def _held(gpu: Gpu, width: int, colors: Mapping[str, Style]) -> list[Part]:
    held = holdings(gpu)
    named: list[tuple[str, float, Style | None]] = [(name, gib, colors.get(name)) for name, gib in held.ours.items()]
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
    size = f"{figure(free, 1):>5} of {figure(memory, 1)} GiB free"
    return line((fit(f"     MIG {plain(profile or UNKNOWN):<10} {size}  {plain(uuid)}", width), None))


def _cell(cell: Cell, placed: Mapping[int, str], colors: Mapping[str, Style]) -> Part:
    """A cell of the matrix, in a server's color if it is between that server's GPUs."""
    server = placed.get(cell.gpu) if cell.gpu is not None else None
    if server is not None and cell.role != "lost" and (cell.other is None or placed.get(cell.other) == server):
        return cell.text, colors.get(server)
    return cell.text, _ROLES.get(cell.role, DIM)


def colors_of(snapshot: FleetSnapshot) -> dict[str, Style]:
    """The color of each server that has GPUs."""
    names = sorted(set(_placed(snapshot).values()) | _holders(snapshot.host))
    return {name: Style(color=COLORS[index % len(COLORS)]) for index, name in enumerate(names)}


def _holders(host: Host | None) -> set[str]:
    return {holder.server for gpu in (host.gpus if host else ()) for holder in gpu.holders if holder.server}


def _placed(snapshot: FleetSnapshot) -> dict[int, str]:
    """Which of our servers is on which GPU, by the memory it holds or as launched."""
    alive = [server for server in snapshot.servers if server.state.alive]
    found = {index: server.name for server in alive for index in snapshot.gpus_of(server)}
    for gpu in snapshot.host.gpus if snapshot.host else ():
        ours = holdings(gpu).ours
        if ours:
            found[gpu.index] = max(ours, key=lambda name: ours[name])
    return found


def _wrong(host: Host, snapshot: FleetSnapshot, width: int) -> list[Strip]:
    """Problems of GPUs, and which share of them may be used."""
    lines = []
    for text in hardware_warnings(host):
        lines += paragraph(f"! {_short(text, host)}", width, WARN)
    for gpu in host.gpus:
        if text := format_share(gpu, snapshot.gpu_shares):
            lines += paragraph(text, width)
    return lines


def _short(text: str, host: Host) -> str:
    """Without the GPU's model name, which the title already shows."""
    found = next((gpu for gpu in host.gpus if text.startswith(gpu.label)), None)
    return f"GPU {found.index}{text.removeprefix(found.label)}" if found is not None else text


def _traffic(host: Host, width: int) -> list[Strip]:
    lines = []
    linked = [gpu for gpu in host.gpus if gpu.nvlinks or _reports_traffic(gpu)]
    if any(map(_reports_traffic, linked)):
        traffic = [
            f"GPU {gpu.index} ↑{figure(gpu.nvlink_sent_gbs, 1)} ↓{figure(gpu.nvlink_received_gbs, 1)}"
            for gpu in linked
            if _reports_traffic(gpu)
        ]
        if silent := [gpu.index for gpu in linked if not _reports_traffic(gpu)]:
            traffic.append(f"GPU {spans(silent)} not reported")
        lines += paragraph(f"NVLink GB/s  {'  '.join(traffic)}", width)
    if words := format_links(host):
        lines += paragraph(f"NVLinks      {words}", width)
    return lines


def _reports_traffic(gpu: Gpu) -> bool:
    return gpu.nvlink_sent_gbs is not None or gpu.nvlink_received_gbs is not None


def _links(host: Host, width: int, named: bool) -> list[Strip]:
    """How the GPUs are linked, if neither a matrix nor the title shows it."""
    summary = links_summary(host)
    if summary is not None:
        return [] if named or not summary else paragraph(f"Links        {summary}", width)
    if max(map(row_width, matrix_rows(host))) + 2 + LEAST_BESIDE > width:
        return [line((f" {fit(plain(row_text(row)), width - 1)}", None)) for row in list_rows(host)]
    return []


def _legend(host: Host, width: int) -> list[Strip]:
    """The meaning of the link types; that of NV4 only if there is a matrix."""
    meanings = legend(host)
    if links_summary(host) is not None:
        meanings = [text for text in meanings if not text.startswith("NV")]
    return paragraph(" · ".join(meanings), width, DIM)


# -- processes ---------------------------------------------------------------------------------------------------------


def process_count(host: Host) -> int:
    """The number of lines that all processes take."""
    return sum(len(gpu.holders) for gpu in host.gpus)


def process_lines(host: Host, now: float, width: int, room: int, colors: Mapping[str, Style]) -> list[Strip]:
    """At most ``room`` lines: a heading, processes by GPU with the largest first, and the number left out.

    ``now`` (Unix seconds) is used as the time of reading if the host has none.
    """
    found = [(gpu, holder) for gpu in host.gpus for holder in sorted(gpu.holders, key=lambda h: -(h.gib or 0.0))]
    if not found or room < min(LEAST_ROOM, len(found) + 1):
        return []
    heading = f"{'GPU':>{_GPU}}{'PID':>{_PID}} {'OWNER':<{_who(width)}}{'GiB':>{_GIB}}{'AGE':>{_AGE}} COMMAND"
    shown = found if len(found) < room else found[: room - 2]
    at = host.at if host.at is not None else now
    lines = [line((fit(heading, width), DIM)), *(_process(*one, at, width, colors) for one in shown)]
    if left := len(found) - len(shown):
        text = f" {left} more process{'' if left == 1 else 'es'}: {key_of('describe_gpus')} lists all"
        lines.append(line((fit(text, width), DIM)))
    return lines


def _who(width: int) -> int:
    """Width of the column for a process's owner; wide screens have room for full names."""
    return min(_WHO_WIDE, max(_WHO, width - _BESIDE_WHO))


def _process(gpu: Gpu, holder: Holder, at: float, width: int, colors: Mapping[str, Style]) -> Strip:
    name = plain(holder.server or holder.user or "unseen")
    size = UNKNOWN if holder.gib is None else f"{holder.gib:.1f}"
    age = UNKNOWN if holder.started_at is None else duration(at - holder.started_at)
    where = f"{gpu.index}/{holder.instance}" if holder.instance is not None else str(gpu.index)
    hidden = not holder.seen and not holder.server
    command = plain(holder.command or ("in a container, or ended" if hidden else UNKNOWN))
    who = _who(width)
    whose = f"{fit(name, min(cell_len(name), who - 1 - len(YOURS)))}{YOURS}" if holder.server else name
    words: Sequence[str | tuple[str, Style | None]] = (
        f"{where:>{_GPU}}{holder.pid:>{_PID}} ",
        (fit(whose, who - 1) + " ", colors.get(holder.server) if holder.server else None),
        f"{size:>{_GIB}}{age:>{_AGE}} ",
        (fit(command, max(0, width - _GPU - _PID - who - _GIB - _AGE - 2)).rstrip(), None),
    )  # fmt: skip
    return line(*words).crop(0, width)
