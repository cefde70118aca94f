"""How a plan looks: the memory it takes, what stands in its way, the command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.format import count
from vllm_console.text import plain
from vllm_console.ui.screens.launch_lines import Outcome, rows_of, section_title, wrapped
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, OK, SIMULATED, WARN
from vllm_console.ui.widgets.draw import Part, fit
from vllm_console.ui.widgets.lines import line
from vllm_console.ui.widgets.memory_bar import budget_line, budget_rows, room_words
from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.common_flags import flag_text
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.model import Changes, EngineKind, Flags, Plan
from vllm_launchers.plan.shell_words import line_word

LEVELS: dict[Level, tuple[str, Style | None]] = {
    Level.ERROR: ("✗", BAD), Level.WARNING: ("!", WARN), Level.ADVICE: ("i", None),
}  # fmt: skip
"""Each level's mark and colour; its name stands beside it."""

MOST_GPU_ROWS = 8
LEAST_COMMAND = 3
WAITING = "working it out …"


def outcome_parts(outcome: Outcome) -> list[Part]:
    """The outcome in a few words, for a title: where it would listen, or that it cannot be."""
    if outcome.error:
        return [("! cannot be launched as it stands", BAD)]
    if outcome.plan is None:
        return []
    simulated = outcome.plan.engine.kind is EngineKind.SIMULATED
    where = f"{plain(outcome.plan.engine.label)} · port {outcome.plan.port}"
    counted = counted_findings(outcome.findings)
    if counted:
        counted = [*counted, (" · ", DIM)]
    return [*counted, (where, SIMULATED if simulated else DIM)]


def counted_findings(findings: Sequence[Finding]) -> list[Part]:
    """``1 error · 2 warnings``; advice is not counted."""
    parts: list[Part] = []
    for level in (Level.ERROR, Level.WARNING):
        count = sum(finding.level is level for finding in findings)
        if count:
            parts += [(" · ", DIM)] if parts else []
            parts.append((f"{count} {level}{'s' if count > 1 else ''}", LEVELS[level][1]))
    return parts


def plan_lines(
    outcome: Outcome, size: tuple[int, int], active: bool, selected: int = 0, *, busy: str = "", fresh: bool = True
) -> list[Strip]:
    """Memory, findings and command line, or why nothing can run.

    Where there is too little room for all of it the finding that is selected stays whole, the others are cut to a line
    each, and the command line to what is left.
    """
    width, height = size
    marks: list[Part] = [(busy or WAITING, ACCENT if busy else DIM)] if busy or not fresh else []
    strips = [section_title("What will run", width, active, marks or counted_findings(outcome.findings))]
    if outcome.error:
        return [*strips, *wrapped(f"! {outcome.error}", width, BAD, " ")]
    plan = outcome.plan
    if plan is None:
        return [*strips, line((f" {WAITING}", DIM))]
    strips += _where(plan, width)
    command, room = command_lines(plan, width), height - len(strips)
    for whole in (True, False):
        memory = _memory(plan, width, whole)
        findings = finding_lines(outcome.findings, plan.flags, width, selected, active)
        if len(memory) + len(findings) + 1 + len(command) <= room:
            return [*strips, *memory, *findings, line(), *command]
    strips += memory
    room = height - len(strips)
    most = max(4, room - 1 - max(LEAST_COMMAND, min(len(command), room // 2)))
    findings = finding_lines(outcome.findings, plan.flags, width, selected, active, most)
    strips += findings if len(findings) + len(command) >= room else [*findings, line()]
    return [*strips, *_cut(command, height - len(strips), width)]


def strip_lines(outcome: Outcome, width: int, selected: int, *, fresh: bool = True, height: int = 3) -> list[Strip]:
    """Budget and the finding that counts, in two or three lines, for where the plan itself is not shown."""
    plan = outcome.plan
    if outcome.error:
        return wrapped(f"✗ {outcome.error}", width, BAD, " ")[:height]
    if plan is None:
        return [line((f" {WAITING}", DIM)), line()]
    first = (
        budget_line(plan.memory, width) if plan.memory is not None else line((fit(f" {_unknown(plan)}", width), DIM))
    )
    findings = outcome.findings
    if not findings:
        return [
            first,
            line()
            if plan.memory and not plan.memory.fits
            else line((" nothing stands in its way", OK if fresh else DIM)),
        ]
    finding = findings[min(selected, len(findings) - 1)]
    mark, style = LEVELS[finding.level]
    tail: list[tuple[str, Style | None]] = []
    if finding.fix is not None:
        tail.append(("  f mends it", KEY))
    if len(findings) > 1:
        tail.append((f"  +{len(findings) - 1} more", DIM))
    length = sum(cell_len(text) for text, _ in tail)
    rows = rows_of(f"{mark} {finding.level}: {finding.message}", width - 3)
    if height == 2 or len(rows) == 1:
        return [first, line((fit(f" {rows[0]}{' …' if len(rows) > 1 else ''}", width - length), style), *tail)]
    rest = rows_of(" ".join(rows[1:]), width - length - 4)
    second = rest[0] + (" …" if len(rest) > 1 else "")
    return [first, line((f" {rows[0]}", style)), line((fit(f"   {second}", width - length), style), *tail)]


def _where(plan: Plan, width: int) -> list[Strip]:
    """Engine, address, GPUs and why these."""
    simulated = plan.engine.kind is EngineKind.SIMULATED
    gpus = f" · GPU {','.join(map(str, plan.gpus))}" if plan.gpus and not plan.placement else ""
    address = f"{'[' + plan.host + ']' if ':' in plan.host else plan.host}:{plan.port}"
    note = " · a simulation: no GPU, no real answers" if simulated else ""
    text = fit(f" {plain(plan.engine.label)} · {plain(address)}{gpus}{note}", width)
    strips = [line((text, SIMULATED if simulated else None))]
    if plan.placement:
        strips += wrapped(f"GPU {plan.placement}", width, None, " ")[:2]
    return strips


def _memory(plan: Plan, width: int, whole: bool) -> list[Strip]:
    """The budget: a bar per GPU and all that was assumed, or in short."""
    memory = plan.memory
    if memory is None:
        return wrapped(_unknown(plan), width, DIM, " ")
    strips = [*budget_rows(memory, width, MOST_GPU_ROWS if whole else 2), line(" ", *room_words(memory, width - 1))]
    told = []
    if memory.kv_bytes_per_token is not None:
        told.append(f"{_bytes(memory.kv_bytes_per_token)} per token and GPU")
    told.append(SOURCES.get(memory.source, memory.source))
    strips.append(line((fit(f" {' · '.join(told)}", width), DIM)))
    if plan.estimated is not None:
        strips.append(line((fit(f" {beside_words(memory, plan.estimated)}", width), DIM)))
    if whole:
        for text in memory.assumed:
            strips += wrapped(f"assumed: {text}", width, DIM, " ")
    elif memory.assumed:
        count = len(memory.assumed)
        first = f"assumed: {memory.assumed[0]}" + (f" (+{count - 1})" if count > 1 else "")
        strips.append(line((fit(f" {plain(first)}", width), DIM)))
    return strips


def beside_words(memory: MemoryBudget, estimated: MemoryBudget) -> str:
    """What holds, and what had been estimated, side by side."""
    name = "engine" if memory.source == "engine" else "corrected"
    off = f" ({estimated.kv_gib / memory.kv_gib - 1:+.0%})" if memory.kv_gib > 0 else ""
    return (
        f"{name} / estimated: weights {memory.weights_gib:.1f} / {estimated.weights_gib:.1f} · "
        f"KV {memory.kv_gib:.1f} / {estimated.kv_gib:.1f} GiB{off} · "
        f"{count(memory.kv_tokens)} / {count(estimated.kv_tokens)} tokens"
    )


SOURCES = {
    "estimate": "an estimate",
    "estimate, corrected": "an estimate, corrected by what an earlier start reported",
    "engine": "as the engine itself reported at an earlier start",
}


def _unknown(plan: Plan) -> str:
    """Why there is no budget, in a line."""
    if plan.engine.build == "cpu":
        return "Memory: a CPU build takes RAM, VLLM_CPU_KVCACHE_SPACE GiB for its KV cache; no GPU is used"
    if not plan.sets and not plan.gpus:
        return "Memory is not known: there is no GPU here to plan for"
    return f"Memory is not known: too little is known of {plain(plan.model)}"


def _bytes(count: float) -> str:
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.2f} MiB"


# -- findings ----------------------------------------------------------------------------------------------------------


def finding_lines(
    findings: Sequence[Finding], flags: Flags, width: int, selected: int, active: bool, most: int | None = None
) -> list[Strip]:
    """Each finding's level, code and sentence; of the selected one also what would mend it.

    ``most`` is how many lines there may be: then only the selected one is whole.
    """
    if not findings:
        return [line((" ✓ nothing stands in its way", OK))]
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
    kept = others[: max(0, room - 1)] if hidden else others  # the worst stay
    strips: list[Strip] = []
    for index in sorted([*kept, selected]):
        strips += chosen if index == selected else [_short(findings[index], width)]
    if hidden and room > 0:
        strips.append(line((f"   {len(others) - len(kept)} more: ↑ ↓", DIM)))
    return strips


def _finding(finding: Finding, flags: Flags, width: int, under_cursor: bool, with_fix: bool) -> list[Strip]:
    mark, style = LEVELS[finding.level]
    first = f"{'▸' if under_cursor else ' '}{mark} "
    rows = rows_of(f"{finding.level} {finding.code}: {finding.message}", width - 3)
    strips = [line((("   " if index else first) + row, style)) for index, row in enumerate(rows)]
    if with_fix and finding.fix is not None:
        rows = rows_of(fix_words(finding.fix, flags), width - 5)[:2]
        strips += [line(("     " if index else "   f ", KEY), (row, ACCENT)) for index, row in enumerate(rows)]
    return strips


def _short(finding: Finding, width: int) -> Strip:
    mark, style = LEVELS[finding.level]
    return line((fit(f" {mark} {finding.level} {finding.code}: {plain(finding.message)}", width), style))


def fix_words(fix: Changes, flags: Flags) -> str:
    """A change of flags in words: ``max-num-seqs 256 → 128, without swap-space``."""
    words = [
        f"{plain(name)} {flag_text(flags.get(name), 'unset')} → {flag_text(value)}" for name, value in fix.set.items()
    ]
    words += [f"without {plain(name)}" for name in fix.unset]
    return ", ".join(words)


# -- the command line --------------------------------------------------------------------------------------------------


def command_text(plan: Plan) -> str:
    """The command line to copy into a shell; secrets are left out."""
    return " ".join(_words(plan))


def command_lines(plan: Plan, width: int) -> list[Strip]:
    """The command line, a flag and its value never apart, ready to be read; secrets are left out."""
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
    """Variables, program, flags: each flag together with its value."""
    from vllm_launchers.plan.secrets import redact_argv, redact_environment

    words = [f"{name}={line_word(value)}" for name, value in redact_environment(plan.environment).items()]
    words += [f'{name}="${name}"' for name in plan.secrets]
    for word in redact_argv(plan.argv):
        quoted = line_word(word)
        if words and words[-1].startswith("--") and " " not in words[-1] and not word.startswith("--"):
            words[-1] += f" {quoted}"
        else:
            words.append(quoted)
    return words


def _cut(command: Sequence[Strip], room: int, width: int) -> list[Strip]:
    """The command line in so many lines; what is left out is said."""
    if len(command) <= room:
        return list(command)
    kept = max(0, room - 1)
    return [*command[:kept], line((fit(f"   … {len(command) - kept} more lines; y copies the whole", width), DIM))]
