"""A plan as lines: memory, findings, command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.alternatives_text import alternative_text, alternatives_table, format_legend, format_pace
from vllm_console.model_text import no_estimate
from vllm_console.runs.text import signed
from vllm_console.text import count, plain, size
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.launch_settings import section_title, text_lines
from vllm_console.ui.parts.launch_planner import PlanOutcome
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, OK, SIMULATED, WARN
from vllm_console.ui.widgets.draw import LEAST_TEXT, Part, cut_rows, fit, fit_words, paragraph, parts_length, wrapped
from vllm_console.ui.widgets.memory_bar import budget_line, budget_rows, room_words
from vllm_launchers.plan.alternatives import Alternative
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.command_line import assignments, line_word
from vllm_launchers.plan.engine_verdict import EngineAnswer, format_verdict
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import redact_argv, redact_environment
from vllm_launchers.units import counted
from vllm_launchers.vllm.engines import EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags, change_text

LEVELS: dict[Level, tuple[str, Style | None]] = {
    Level.ERROR: ("✗", BAD), Level.WARNING: ("!", WARN), Level.ADVICE: ("i", None),
}  # fmt: skip
"""Each level's mark and color; its name is shown next to them."""

MOST_GPU_ROWS = 8
LEAST_COMMAND = 3
WAITING = "planning…"

NO_VLLM = (
    "No vLLM was found: this starts the simulated engine (no GPU, no real answers). "
    "For a real one: 'vllm-console engines install', or set vllm in config.toml."
)
"""Shown if the simulated engine would start because no vLLM was found. One key starts it anyway: it needs no GPU and
leaves nothing behind, and new users see this screen first."""


def outcome_parts(outcome: PlanOutcome, room: int) -> list[Part]:
    """The outcome for a title, in up to ``room`` cells: the address it would listen on, or that it cannot be launched.

    If both do not fit, only the number of errors and warnings.
    """
    if outcome.error:
        return [("✗ can't be launched", BAD)]
    if outcome.plan is None:
        return []
    simulated = outcome.plan.engine.kind is EngineKind.SIMULATED
    where = f"{plain(outcome.plan.engine.label)} · port {outcome.plan.port}"
    problems = counted_findings(outcome.findings)
    whole: list[Part] = [*problems, (" · ", DIM)] if problems else []
    whole.append((where, SIMULATED if simulated else DIM))
    return problems if problems and parts_length(whole) > room else whole


def counted_findings(findings: Sequence[PlanFinding]) -> list[Part]:
    """``1 error · 2 warnings``; advice is not counted."""
    parts: list[Part] = []
    for level in (Level.ERROR, Level.WARNING):
        count = sum(finding.level is level for finding in findings)
        if count:
            parts += [(" · ", DIM)] if parts else []
            parts.append((counted(count, level), LEVELS[level][1]))
    return parts


def launch_plan_lines(
    outcome: PlanOutcome,
    size: tuple[int, int],
    active: bool,
    selected: int = 0,
    *,
    busy: str = "",
    fresh: bool = True,
    asking: str = "",
    note: str = "",
) -> list[Strip]:
    """Memory, findings and command line, or why nothing can run.

    ``asking`` is the status of the engine's verdict and of the prepared process. ``note`` is a note about the engine.

    If not everything fits, the selected finding stays whole, the others are cut to one line each, and the command line
    to the rest. If even the selected finding does not fit, it comes before the memory, which is cut to one line, and
    the note is left out.
    """
    width, height = size
    marks: list[Part] = [(busy or WAITING, ACCENT if busy else DIM)] if busy or not fresh else []
    strips = [section_title("What will run", width, active, marks or counted_findings(outcome.findings))]
    if outcome.error:
        strips += [*text_lines(f"✗ {outcome.error}", width, BAD), *_fix_lines(outcome.fix, outcome.flags, width)]
        return [*strips, *text_lines(note, width, WARN)]
    plan = outcome.plan
    if plan is None:
        return [*strips, line((f" {WAITING}", DIM))]
    above = [*strips, *_where(plan, width, noted=bool(note))]
    strips = [*above, *text_lines(note, width, WARN)]
    command, room = command_lines(plan, width), height - len(strips)
    for whole, ways in ((True, _table(plan, width)), (False, _ways(plan, width)), (False, _ways(plan, width, most=1))):
        memory = [*_memory(plan, width, whole), *ways]
        findings = plan_finding_lines(outcome.findings, plan.flags, width, selected, active)
        findings += _conclusion(plan, width, asking)
        if len(memory) + len(findings) + 1 + len(command) <= room:
            return [*strips, *memory, *findings, line(), *command]
    conclusion = _conclusion(plan, width, asking)
    chosen = outcome.findings[min(selected, len(outcome.findings) - 1) :][:1]
    needed = len(plan_finding_lines(chosen, plan.flags, width, 0, active))
    if needed > height - len(strips) - len(memory):
        return _findings_first(above, outcome, plan, size, active, selected)
    strips += memory
    room = height - len(strips)
    most = max(4, room - 1 - len(conclusion) - max(LEAST_COMMAND, min(len(command), room // 2)))
    findings = [*plan_finding_lines(outcome.findings, plan.flags, width, selected, active, most), *conclusion]
    strips += findings if len(findings) + len(command) >= room else [*findings, line()]
    return [*strips, *_cut(command, height - len(strips), width)]


def _findings_first(
    above: Sequence[Strip], outcome: PlanOutcome, plan: Plan, size: tuple[int, int], active: bool, selected: int
) -> list[Strip]:
    """The plan in very few rows: findings, then the budget in one line, then the command line."""
    width, height = size
    room = height - len(above)
    findings = plan_finding_lines(outcome.findings, plan.flags, width, selected, active, max(1, room - 2))
    strips = [*above, *findings, _short_budget(plan, width)]
    return [*strips, *_cut(command_lines(plan, width), height - len(strips), width)][:height]


def _short_budget(plan: Plan, width: int) -> Strip:
    if plan.memory is not None:
        return budget_line(plan.memory, width)
    return line((fit_words(f" {no_estimate(plan)}", width), DIM))


def strip_lines(
    outcome: PlanOutcome, width: int, selected: int, *, fresh: bool = True, height: int = 3, asking: str = ""
) -> list[Strip]:
    """The budget and the selected finding in up to ``height`` lines, for use where the plan itself is not shown."""
    plan = outcome.plan
    if outcome.error:
        fix = _fix_lines(outcome.fix, outcome.flags, width, most=1)
        return [*text_lines(f"✗ {outcome.error}", width, BAD)[: height - len(fix)], *fix]
    if plan is None:
        return [line((f" {WAITING}", DIM)), line()]
    first = _short_budget(plan, width)
    findings = outcome.findings
    if not findings:
        if plan.memory and not plan.memory.fits:
            return [first, line()]
        if imitated := _imitated(plan):  # in place of the simulated engine's verdict
            plan, asking = replace(plan, verdict=None), imitated
        return [first, ready_line(plan, width, fresh=fresh, asking=asking)]
    finding = findings[min(selected, len(findings) - 1)]
    tail: list[tuple[str, Style | None]] = []
    if finding.fix is not None:
        tail.append((f"  {key_of('launch_fix')} fix", KEY))
    if len(findings) > 1:
        tail.append((f"  +{len(findings) - 1} more", DIM))
    return [first, *_strip_finding(finding, tail, width, max(1, height - 1))]


def _strip_finding(
    finding: PlanFinding, tail: Sequence[tuple[str, Style | None]], width: int, most: int
) -> list[Strip]:
    """A finding in up to ``most`` lines, with its keys at the end of the last one."""
    mark, style = LEVELS[finding.level]
    rows = list(wrapped(plain(f"{mark} {finding.level}: {finding.message}"), max(LEAST_TEXT, width - 3)))
    beside = width - sum(cell_len(text) for text, _ in tail) - 3
    if cell_len(rows[-1]) > beside and len(rows) < most:
        rows.append("")
    if len(rows) > most or cell_len(rows[-1]) > beside:
        rows = [*rows[: most - 1], *wrapped(" ".join(rows[most - 1 :]), max(LEAST_TEXT, beside), 1)]
    strips = [line(((" " if at == 0 else "   ") + row, style)) for at, row in enumerate(rows[:-1])]
    last = ("   " if strips else " ") + rows[-1]
    return [*strips, line((fit(last, beside + 3), style), *tail)]


def _imitated(plan: Plan) -> str:
    """The GPU that the memory figures assume if there is none, which the strip shows nowhere else."""
    simulated = plan.engine.kind is EngineKind.SIMULATED
    return f"assumed: {plan.memory.assumed[0]}" if simulated and plan.memory and plan.memory.assumed else ""


def ready_line(plan: Plan, width: int, *, fresh: bool = True, asking: str = "") -> Strip:
    """That the plan is ready to launch, or that its memory could not be checked, which is not an approval."""
    text, style = (" ! memory not checked", WARN) if plan.memory is None else (" ✓ ready to launch", OK)
    verdict, of_verdict = _verdict(plan, asking)
    more = fit_words(f" · {verdict}", width - len(text)) if verdict else ""
    return line((text, style if fresh else DIM), (more, of_verdict if fresh else DIM))


def _conclusion(plan: Plan, width: int, asking: str) -> list[Strip]:
    """The lines below the findings: the engine's own verdict unless it is a finding; without findings, readiness."""
    if not plan.findings:
        return [ready_line(plan, width, asking=asking)]
    text, style = _verdict(plan, asking)
    if not text:
        return []
    return text_lines(text, width, style, "   ", first=[(" ✓ ", style)] if style is OK else ())


def _verdict(plan: Plan, asking: str) -> tuple[str, Style | None]:
    """The engine's verdict and what is being prepared, or that the verdict is pending.

    Empty if the engine was not asked, or if its verdict is a finding.
    """
    verdict = plan.verdict
    if verdict is None or verdict.answer is EngineAnswer.REFUSED:
        return plain(asking), DIM
    text = "; ".join(filter(None, (format_verdict(plan, verdict), asking)))
    return plain(text), OK if verdict.answer is EngineAnswer.ACCEPTED else DIM


def _where(plan: Plan, width: int, *, noted: bool) -> list[Strip]:
    """Engine, address, whether it gets the probe, and the GPUs with the reason."""
    simulated = plan.engine.kind is EngineKind.SIMULATED
    gpus = f" · GPU {','.join(map(str, plan.gpus))}" if plan.gpus and not plan.placement else ""
    address = f"{'[' + plan.host + ']' if ':' in plan.host else plan.host}:{plan.port}"
    note = " · a simulation: no GPU, no real answers" if simulated and not noted else ""
    probe = " · probe" if plan.probe.variables else " · no probe"
    text = fit_words(f" {plain(plan.engine.label)} · {plain(address)}{gpus}{probe}{note}", width)
    strips = [line((text, SIMULATED if simulated else None))]
    if plan.placement:
        strips += cut_rows(text_lines(f"GPU {plan.placement}", width), 2, width)
    return strips


def _memory(plan: Plan, width: int, whole: bool) -> list[Strip]:
    """The budget: a bar per GPU and all assumptions, or a short form."""
    memory = plan.memory
    if memory is None:
        return text_lines(no_estimate(plan), width, DIM)
    strips = [*budget_rows(memory, width, MOST_GPU_ROWS if whole else 2), line(" ", *room_words(memory, width - 1))]
    notes = []
    if memory.kv_bytes_per_token is not None:
        each = " on each GPU" if len(plan.gpus) > 1 else ""
        notes.append(f"{size(memory.kv_bytes_per_token)} per token{each}")
    notes.append(SOURCES.get(memory.source, memory.source))
    strips.append(line((fit_words(f" {' · '.join(notes)}", width), DIM)))
    if plan.estimated is not None:
        strips += text_lines(format_estimated(memory, plan.estimated), width, DIM)
    if whole:
        for text in memory.assumed:
            strips += text_lines(f"assumed: {text}", width, DIM)
    elif memory.assumed:
        count = len(memory.assumed)
        first = f"assumed: {memory.assumed[0]}" + (f" (+{count - 1})" if count > 1 else "")
        strips.append(line((fit_words(f" {plain(first)}", width), DIM)))
    return strips


def format_estimated(memory: MemoryBudget, estimated: MemoryBudget) -> str:
    """The current and the previously estimated budget, side by side."""
    off = f" ({signed(memory.kv_gib / estimated.kv_gib - 1)})" if estimated.kv_gib > 0 else ""
    return (
        f"estimated before: weights {estimated.weights_gib:.1f} → {memory.weights_gib:.1f} GiB · "
        f"KV cache {estimated.kv_gib:.1f} → {memory.kv_gib:.1f} GiB{off} · "
        f"{count(estimated.kv_tokens)} → {count(memory.kv_tokens)} tokens"
    )


SOURCES = {
    "estimate": "estimate",
    "estimate, corrected": "estimate, corrected by an earlier start's report",
    "engine": "as reported by the engine at an earlier start",
}


def _table(plan: Plan, width: int) -> list[Strip]:
    """All layouts with their expected pace; only the pace if there is just one layout."""
    if len(plan.alternatives) < 2:
        return _ways(plan, width)
    rows = alternatives_table(plan.alternatives, narrow=width < WIDE_TABLE, room=width - 1)
    strips = [line((fit(f" {row}", width), DIM if at == 0 else None)) for at, row in enumerate(rows)]
    return [*strips, *text_lines(format_legend(plan.alternatives), width, DIM)]


def _ways(plan: Plan, width: int, most: int | None = None) -> list[Strip]:
    """The expected pace in up to ``most`` lines, and the number of other layouts."""
    others = len(plan.alternatives) - 1
    strips = []
    label = "expected: "
    if plan.paces is not None and (text := format_pace(plan.paces, width - len(label) - 1 if most == 1 else None)):
        text = f"{label}{text}"
        strips += [line((fit(f" {text}", width), DIM))] if most == 1 else text_lines(text, width, DIM)
    if others > 0:
        text = f" {key_of('launch_layouts')} compares {counted(others, 'other layout')}"
        strips.append(line((fit(text, width), KEY)))
    return strips


def layout_lines(outcome: PlanOutcome, size: tuple[int, int], selected: int, *, fresh: bool = True) -> list[Strip]:
    """Layouts side by side; for the one under the cursor the reason, the cost, and the flags it changes."""
    width, height = size
    marks: list[Part] = [] if fresh else [(WAITING, DIM)]
    strips = [section_title("Layouts", width, True, marks)]
    plan = outcome.plan
    if plan is None or not plan.alternatives:
        return [*strips, line((f" {WAITING}", DIM))]
    at = min(selected, len(plan.alternatives) - 1)
    one = plan.alternatives[at]
    below = text_lines(f"{one.label}: {alternative_text(one)}", width)
    if not one.chosen:
        below += text_lines(f"{key_of('launch_open')} applies: {format_alternative(one, plan.flags)}", width, KEY)
    rows = alternatives_table(plan.alternatives, narrow=width < WIDE_TABLE, room=width - 2)
    shown = [line((fit(f"  {rows[0]}", width), DIM))]
    shown += [
        line((fit(f"{'▸' if number == at else ' '} {row}", width), ACCENT if number == at else None))
        for number, row in enumerate(rows[1:])
    ]
    shown += text_lines(format_legend(plan.alternatives), width, DIM, "  ")
    room = height - len(strips) - 1
    return [*strips, *shown, line(), *below[: max(1, room - len(shown))]]


WIDE_TABLE = 100
"""Minimum columns to show the labels of layouts in full."""


def format_alternative(one: Alternative, flags: Flags) -> str:
    """What applying it changes: flags, and the model if it is another checkpoint."""
    changed = {name: value for name, value in one.changes.set.items() if flags.get(name) != value}
    words = [f"model {plain(one.model)}"] if one.model is not None else []
    words += [found] if (found := format_fix(Changes(changed, one.changes.unset), flags)) else []
    return ", ".join(words)


# -- findings ----------------------------------------------------------------------------------------------------------


def plan_finding_lines(
    findings: Sequence[PlanFinding], flags: Flags, width: int, selected: int, active: bool, most: int | None = None
) -> list[Strip]:
    """Each finding's level, code and sentence; for the selected one also its fix.

    ``most`` is the maximum number of lines; if exceeded, only the selected finding is whole.
    """
    if not findings:
        return []
    selected = min(selected, len(findings) - 1)
    whole = [
        _finding(finding, flags, width, index == selected and active, index == selected)
        for index, finding in enumerate(findings)
    ]
    if most is None or sum(map(len, whole)) <= most:
        return [strip for strips in whole for strip in strips]
    chosen = whole[selected][:most]
    others = [index for index in range(len(findings)) if index != selected]
    room = most - len(chosen)
    hidden = len(others) - room if len(others) > room else 0
    kept = others[: max(0, room - 1)] if hidden else others  # keep the most severe
    strips: list[Strip] = []
    for index in sorted([*kept, selected]):
        strips += chosen if index == selected else [_short(findings[index], width)]
    if hidden and room > 0:
        strips.append(line((f"   {len(others) - len(kept)} more: ↑ ↓", DIM)))
    return strips


def _finding(finding: PlanFinding, flags: Flags, width: int, under_cursor: bool, with_fix: bool) -> list[Strip]:
    mark, style = LEVELS[finding.level]
    first = f"{'▸' if under_cursor else ' '}{mark} "
    text = f"{finding.level} {finding.code}: {finding.message}"
    strips = text_lines(text, width, style, "   ", first=[(first, style)])
    if with_fix:
        strips += _fix_lines(finding.fix, flags, width)
    return strips


def _fix_lines(fix: Changes | None, flags: Flags, width: int, most: int = 2) -> list[Strip]:
    """The key that applies a fix, and what it changes; empty without one."""
    if fix is None:
        return []
    key = f"   {key_of('launch_fix')} fix: "
    return paragraph(format_fix(fix, flags), width, ACCENT, " " * len(key), first=[(key, KEY)], most=most)


def _short(finding: PlanFinding, width: int) -> Strip:
    mark, style = LEVELS[finding.level]
    return line((fit_words(f" {mark} {finding.level} {finding.code}: {plain(finding.message)}", width), style))


def format_fix(fix: Changes, flags: Flags) -> str:
    """A flag change as text: ``max-num-seqs 256 → 128, without swap-space``."""
    words = [plain(change_text(name, flags.get(name), value)) for name, value in fix.set.items()]
    words += [f"without {plain(name)}" for name in fix.unset]
    return ", ".join(words)


# -- the command line --------------------------------------------------------------------------------------------------


def command_text(plan: Plan) -> str:
    """The command line to copy into a shell, without secrets."""
    return " ".join(_words(plan))


def command_lines(plan: Plan, width: int) -> list[Strip]:
    """The command line for display, never separating a flag from its value; without secrets."""
    room = max(20, width - 6)
    rows: list[str] = []
    for word in _words(plan):
        if rows and len(rows[-1]) + len(word) + 1 <= room:
            rows[-1] += f" {word}"
        else:
            rows += [word[at : at + room] for at in range(0, len(word), room)]
    return [
        line((" " if index == 0 else "   ") + text + ("" if index == len(rows) - 1 else " \\"))
        for index, text in enumerate(rows)
    ]


def _words(plan: Plan) -> list[str]:
    """Variables, program and flags; each flag together with its value."""
    words = assignments(redact_environment(plan.environment))
    words += [f'{name}="${name}"' for name in plan.secrets]
    for word in redact_argv(plan.argv):
        quoted = line_word(word)
        if words and words[-1].startswith("--") and " " not in words[-1] and not word.startswith("--"):
            words[-1] += f" {quoted}"
        else:
            words.append(quoted)
    return words


def _cut(command: Sequence[Strip], room: int, width: int) -> list[Strip]:
    """The command line in ``room`` lines; the last one counts those left out."""
    if len(command) <= room:
        return list(command)
    kept = max(0, room - 1)
    more = f"   … {len(command) - kept} more lines; {key_of('launch_copy')} copies all"
    return [*command[:kept], line((fit(more, width), DIM))]
