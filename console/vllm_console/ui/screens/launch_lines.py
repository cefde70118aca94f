"""How the launch screen's three sections look. Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.api import PresetProblem
from vllm_console.fleet.model import Preset
from vllm_console.format import seconds
from vllm_console.text import plain
from vllm_console.ui.launch_draft import ABOUT, CHOSEN, FIELDS, LaunchDraft, set_devices
from vllm_console.ui.theme import ACCENT, BAD, CURSOR, DIM, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, rule
from vllm_console.ui.widgets.lines import line
from vllm_launchers.plan.common_flags import common_flag, flag_text, name_warning
from vllm_launchers.plan.model import EngineKind, Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the choices come to: a plan, or a sentence that says why there is none; neither while it is worked out."""

    plan: Plan | None = None
    error: str = ""


def section_title(text: str, width: int, active: bool, right: Sequence[Part] = ()) -> Strip:
    """A section's first line; the one that has the keys is marked."""
    return rule(f"{'▸ ' if active else ''}{text}", width, right, ACCENT if active else STRONG)


def preset_lines(
    presets: Sequence[Preset],
    problems: Sequence[PresetProblem],
    draft: LaunchDraft,
    size: tuple[int, int],
    active: bool,
) -> list[Strip]:
    """Each preset's name and title, what the chosen one is for, then the files that could not be used."""
    width, height = size
    strips: list[Strip] = []
    at = 0
    for preset in presets:
        chosen = preset.name == draft.preset.name
        at = len(strips) if chosen else at
        mark = "*" if draft.touched(preset) else " "
        own = "" if preset.shipped else " (yours)"
        strips.append(line((fit(f"{'▸' if chosen else ' '}{mark}{plain(preset.name)}{own}", width),
                            CURSOR if chosen and active else ACCENT if chosen else STRONG)))  # fmt: skip
        strips += _wrapped(preset.title, width, DIM, "   ")
    for problem in problems:
        file = PurePath(problem.path)  # its name first, since a folder's may be longer than the line
        strips.append(line((fit(f" ! {plain(file.name)}  {plain(str(file.parent))}", width), WARN)))
        strips += _wrapped(problem.message.removeprefix(f"{problem.path}: "), width, WARN, "   ")
    about = [line(), *_about_preset(draft.preset, width)]
    room = max(3, height - 1 - len(about)) if height > len(about) + 8 else height - 1
    first = min(max(0, at - room // 2), max(0, len(strips) - room))
    return [section_title("Presets", width, active), *strips[first : first + room], *about]


def _about_preset(preset: Preset, width: int) -> list[Strip]:
    work, goals = preset.workload, preset.objectives
    made_for = (
        f"{work.concurrency:,} requests at once, prompts up to {work.input_tokens_p95:,} tokens, answers up to "
        f"{work.output_tokens_p95:,}, {work.prefix_reuse:.0%} of a prompt seen before"
    )
    goal = (
        f"first token within {seconds(goals.ttft_p99_seconds)}, gaps within {seconds(goals.itl_p99_seconds)} (p99), "
        f"KV cache up to {goals.kv_cache_usage:.0%}, at most {goals.preemption_rate:.1%} of requests preempted"
    )
    strips = _wrapped(preset.summary, width, None, " ")
    for head, text in (("model", preset.model), ("made for", made_for), ("goals", goal)):
        strips += [line((f" {head}", DIM)), *_wrapped(text, width, None, "   ")]
    return strips


def setting_names(draft: LaunchDraft) -> list[str]:
    """What the lines of the settings are about: fields, then flags."""
    return [*draft.shown, *draft.edits.names()]


def setting_lines(
    draft: LaunchDraft, plan: Plan | None, width: int, height: int, cursor: int, active: bool
) -> list[Strip]:
    """Fields and flags with the reason for each, as many as fit around the cursor; below, the whole of its reason."""
    names = setting_names(draft)
    settings = [_setting(draft, plan, name) for name in names]
    columns = (
        min(28, max(16, width // 3)),
        min(24, max(8, *(len(value) for _, value, _ in settings[len(draft.shown) :]), 8)),
    )
    rows = [
        _setting_row(name, setting, columns, width, index == cursor and active)
        for index, (name, setting) in enumerate(zip(names, settings, strict=True))
    ]
    rows.insert(len(draft.shown), line((" Flags", DIM)))
    at = min(cursor, len(names) - 1)
    detail = [line(), *_wrapped(about_setting(draft, names[at]), width, None, " ")]
    detail += _wrapped(settings[at][2], width, DIM, " ")
    room = max(4, height - 1 - len(detail))
    at += at >= len(draft.shown)
    first = min(max(0, at - room // 2), max(0, len(rows) - room))
    count = len(draft.edits.edits)
    title = section_title("Settings", width, active, ((f"{count} changed", ACCENT),) if count else ())
    return [title, *rows[first : first + room], *(detail if active else ())]


def _setting_row(
    name: str, setting: tuple[bool, str, str], columns: tuple[int, int], width: int, under_cursor: bool
) -> Strip:
    edited, value, why = setting
    label = f" {'*' if edited else ' '}{fit(name, columns[0])} "
    text = label + (plain(value) if name in FIELDS else fit(plain(value), columns[1]))
    text = fit(text, min(width, len(text)))
    reason = fit(f"  {plain(why)}", max(0, width - cell_len(text)))
    style = CURSOR if under_cursor else ACCENT if edited else None
    return line((text, style), (reason, CURSOR if under_cursor else DIM))


def _setting(draft: LaunchDraft, plan: Plan | None, name: str) -> tuple[bool, str, str]:
    """Whether it is edited, its value, and why it is so."""
    if name not in FIELDS:
        value = draft.edits.value(name)
        shown = flag_text(value) if value is not None else ("left out" if name in draft.edits.base else "no value yet")
        return draft.edits.changed(name), shown, draft.reason(name, plan.reasons if plan else {})
    if name == "gpus":
        return _gpus_setting(draft, plan)
    text = draft.text(name)
    if text:
        return True, text, ""
    if name == "model":
        return False, draft.preset.model, ""
    resolved = {"engine": plan.engine.label, "host": plan.host, "port": str(plan.port)} if plan else {}
    if name == "name":
        return False, f"{CHOSEN[name]} ({draft.preset.name})", ""
    known = resolved.get(name, CHOSEN[name])
    return False, CHOSEN[name] if known == CHOSEN[name] else f"{CHOSEN[name]} → {known}", ""


def _gpus_setting(draft: LaunchDraft, plan: Plan | None) -> tuple[bool, str, str]:
    """The chosen set with the reason for it; beside it which GPUs these are, and what is wrong with them."""
    chosen = draft.chosen_set
    if isinstance(chosen, str):
        return True, f"{chosen}: vLLM takes what it finds", ""
    if chosen is None:
        best = next((one for one in draft.sets if plan and one.reason == plan.placement), None)
        if best is None:
            return False, CHOSEN["gpus"], "" if plan is None else "no GPU is given to it"
        return False, f"{CHOSEN['gpus']} → {best.reason}", "; ".join([set_devices(best), *best.warnings])
    return True, chosen.reason, "; ".join([set_devices(chosen), *chosen.warnings])


def about_setting(draft: LaunchDraft, name: str) -> str:
    """One line on what a field or flag is."""
    if name in FIELDS:
        return ABOUT[name]
    flag = common_flag(name)
    return f"{flag.meaning} (vLLM's default: {flag.default})" if flag else name_warning(name, draft.preset.flags)


def outcome_parts(outcome: Outcome) -> list[Part]:
    """The outcome in a few words, for a title: where it would listen, or that it cannot be."""
    if outcome.error:
        return [("! cannot be launched as it stands", BAD)]
    if outcome.plan is None:
        return []
    simulated = outcome.plan.engine.kind is EngineKind.SIMULATED
    count = len(outcome.plan.warnings)
    warned: list[Part] = [(f"{count} warning{'s' if count > 1 else ''} · ", WARN)] if count else []
    where = f"{plain(outcome.plan.engine.label)} · port {outcome.plan.port}"
    return [*warned, (where, SIMULATED if simulated else DIM)]


def plan_lines(outcome: Outcome, width: int, active: bool, busy: str) -> list[Strip]:
    """What would run: engine, address, warnings, command line; or why nothing can."""
    strips = [section_title("What will run", width, active)]
    plan = outcome.plan
    if busy:
        strips += _wrapped(busy, width, ACCENT, " ")
    if outcome.error:
        return [*strips, *_wrapped(f"! {outcome.error}", width, BAD, " ")]
    if plan is None:
        return [*strips, *([] if busy else [line((" working it out …", DIM))])]
    simulated = plan.engine.kind is EngineKind.SIMULATED
    gpus = f" · GPU {','.join(map(str, plan.gpus))}" if plan.gpus else ""
    address = f"{'[' + plan.host + ']' if ':' in plan.host else plan.host}:{plan.port}"
    strips.append(line((fit(f" {plain(plan.engine.label)} · {plain(address)}{gpus}", width),
                        SIMULATED if simulated else None)))  # fmt: skip
    if simulated:
        strips.append(line((fit(" a simulation: no GPU, no real answers", width), SIMULATED)))
    if plan.placement:
        strips += _wrapped(f"GPU {plan.placement}", width, None, " ")
    for warning in plan.warnings:
        strips += _wrapped(f"! {warning}", width, WARN, " ")
    return [*strips, line(), *command_lines(plan, width)]


def command_lines(plan: Plan, width: int) -> list[Strip]:
    """The command line, a flag and its value never apart, ready to be read; secrets are left out."""
    from vllm_launchers.plan.secrets import redact_argv, redact_environment

    room = max(20, width - 6)
    words = [f"{name}={shlex.quote(value)}" for name, value in redact_environment(plan.environment).items()]
    words += [f'{name}="${name}"' for name in plan.secrets]
    for word in redact_argv(plan.argv):
        quoted = plain(shlex.quote(word))
        if words and words[-1].startswith("--") and " " not in words[-1] and not word.startswith("--"):
            words[-1] += f" {quoted}"
        else:
            words.append(quoted)
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + len(word) + 1 <= room:
            rows[-1] += f" {word}"
        else:
            rows += [word[at : at + room] for at in range(0, len(word), room)]
    return [
        line((" " if index == 0 else "   ") + text + ("" if index == len(rows) - 1 else " \\"))
        for index, text in enumerate(rows)
    ]


def _wrapped(text: str, width: int, style: object, indent: str) -> list[Strip]:
    from rich.style import Style

    chosen = style if isinstance(style, Style) else None
    rows = textwrap.wrap(plain(text), max(10, width - len(indent)), max_lines=6, placeholder=" …")
    return [line((indent + row, chosen)) for row in rows]
