"""The launch screen's presets and settings as lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import msgspec
from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.types import PresetProblem
from vllm_console.text import objectives_text, plain, sourced
from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.launch_draft import ABOUT, CHOSEN, FIELDS, LaunchDraft, set_devices
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, CURSOR, DIM, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, cut_rows, fit, fit_words, paragraph, rule, wrapped
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Preset
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import flag_text

MOST_REASON = 12
"""Maximum rows of a reason."""

LEAST_ROWS = 4
"""Minimum rows of settings, however long a description is."""

LEAST_REASON = 24
"""Minimum columns for a reason to continue in the next row."""


def section_title(text: str, width: int, active: bool, right: Sequence[Part] = ()) -> Strip:
    """A section's first line; the active section is marked."""
    return rule(f"{'▸ ' if active else ''}{text}", width, right, style=ACCENT if active else STRONG)


def preset_lines(
    presets: Sequence[Preset],
    problems: Sequence[PresetProblem],
    draft: LaunchDraft,
    size: tuple[int, int],
    active: bool,
) -> list[Strip]:
    """Each preset's name and title, the unusable files, then a description of the chosen preset as far as it fits."""
    width, height = size
    strips: list[Strip] = []
    heads: list[int] = []
    """The first row of each preset and file."""
    at = 0
    for preset in presets:
        chosen = preset.name == draft.preset.name
        at = len(strips) if chosen else at
        heads.append(len(strips))
        mark = "*" if draft.touched(preset) else " "
        own = "" if preset.shipped else " (yours)"
        strips.append(line((fit(f"{'▸' if chosen else ' '}{mark}{plain(preset.name)}{own}", width),
                            CURSOR if chosen and active else ACCENT if chosen else STRONG)))  # fmt: skip
        if preset.title.casefold().replace(" ", "-") != preset.name:
            strips += text_lines(preset.title, width, DIM, "   ")
    before = ""
    for problem in problems:
        file = PurePath(problem.path)  # name first, since the folder may be longer than the line
        if problem.path != before:
            heads.append(len(strips))
            strips.append(line((fit(f" ! {plain(file.name)}  {plain(str(file.parent))}", width), WARN)))
        before = problem.path
        strips += text_lines(problem.message.removeprefix(f"{problem.path}: "), width, WARN, "   ")
    model = draft.text("model")
    about = [line(), *_about_preset(draft.preset, model, width)]
    room = max(3, height - 1 - len(about)) if height > len(about) + 8 else height - 1
    first = min(max(0, at - room // 2), max(0, len(strips) - room))
    end = first + room
    rows = strips[first:end]
    if end < len(strips) and (hidden := sum(head >= end - 1 for head in heads)):
        rows[-1] = line((f"   … {hidden} more", DIM))
    left = height - 1 - len(rows)
    if left < len(about):
        about = cut_rows(_about_preset(draft.preset, model, width, short=True), left, width) if left > 0 else []
    return [section_title("Presets", width, active), *rows, *about]


def _about_preset(preset: Preset, chosen: str, width: int, *, short: bool = False) -> list[Strip]:
    """A preset's purpose. ``chosen`` is the model that replaces its own, or empty. ``short`` uses fewer rows."""
    model = f"{chosen}, instead of {preset.model}" if chosen and chosen != preset.model else preset.model
    work = preset.workload
    sized_for = (
        f"{counted(work.concurrency, 'concurrent request')}, p95 {work.input_tokens_p95:,} tokens in and "
        f"{work.output_tokens_p95:,} out, {work.prefix_reuse:.0%} of a prompt shared"
    )
    objectives = objectives_text(preset.objectives)
    strips = text_lines(preset.summary, width)
    for head, text in (("model", model), ("sized for", sized_for), ("objectives", objectives)):
        if short:
            strips += text_lines(f"{head}: {text}", width)
        else:
            strips += [line((f" {head}", DIM)), *text_lines(text, width, indent="   ")]
    return strips


def setting_lines(
    draft: LaunchDraft, plan: Plan | None, catalog: FlagCatalog, size: tuple[int, int], cursor: int, active: bool
) -> list[Strip]:
    """The fields and flags that fit around the cursor, each with its reason, in full if there is room.

    Below them, the description of the one under the cursor.
    """
    width, height = size
    names = draft.names
    settings = [_setting(draft, plan, name) for name in names]
    columns = (
        min(28, max(16, width // 3), max(map(cell_len, names))),
        min(24, max(8, *(len(setting.value) for setting in settings[len(draft.shown) :]), 8)),
    )
    at = min(cursor, len(names) - 1)
    detail = _about_setting(draft, catalog, names[at], settings[at], width) if active else []
    most = max(1, min(max(5, height // 3), height - 2 - LEAST_ROWS))
    detail = [line(), *cut_rows(detail, most, width)] if detail else []
    room = max(LEAST_ROWS, height - 1 - len(detail))
    spare = room - len(names) - 1
    blocks: list[list[Strip]] = []
    for index, (name, setting) in enumerate(zip(names, settings, strict=True)):
        rows = _setting_rows(name, setting, columns, width, index == cursor and active, MOST_REASON)
        if len(rows) - 1 > max(0, spare):  # every flag gets a row before any reason gets a second one
            rows = _setting_rows(name, setting, columns, width, index == cursor and active, 1)
        spare -= len(rows) - 1
        blocks.append(rows)
    blocks.insert(len(draft.shown), [line((" Flags", DIM))])
    rows = [row for block in blocks for row in block]
    at += at >= len(draft.shown)
    first = min(max(0, at - room // 2), max(0, len(rows) - room))
    count = len(draft.edits.edits)
    title = section_title("Settings", width, active, ((f"{count} changed", ACCENT),) if count else ())
    shown = rows[first : first + room]
    if (below := len(rows) - first - len(shown)) > 0:
        shown[-1] = line((f"   … {below + 1} more", DIM))
    return [title, *shown, *detail]


def adding_lines(
    catalog: FlagCatalog, found: Sequence[str], pick: int, text: str, size: tuple[int, int]
) -> list[Strip]:
    """The flags that match the input, the selected one highlighted, with its meaning below."""
    width, height = size
    strips = [section_title("Add a flag", width, True, ((catalog.source, DIM),))]
    if not found:
        return [*strips, *text_lines(catalog.no_match(text), width, WARN)]
    facts = catalog.facts(found[pick])
    detail = [line()]
    if facts is not None:
        detail += text_lines(f"{facts.name}: {facts.help or facts.meaning}", width)[:3]
        detail += text_lines(f"takes {facts.takes}; vLLM's default: {facts.default}", width, DIM)[:2]
    room = max(3, height - 1 - len(detail))
    first = min(max(0, pick - room // 2), max(0, len(found) - room))
    column = min(36, max(16, width // 2))
    for index, name in enumerate(found[first : first + room], first):
        known = catalog.facts(name)
        text_ = fit(f" {fit(plain(name), column)}  {plain(known.meaning) if known else ''}", width)
        strips.append(line((text_, CURSOR if index == pick else None)))
    return [*strips, *detail]


class _Setting(msgspec.Struct, frozen=True):
    """A settings line: whether it was changed, its value, who chose it, why, and the trade-off."""

    edited: bool
    value: str
    why: str = ""
    source: str = ""
    tradeoff: str = ""

    @property
    def reason(self) -> str:
        """The value's reason and trade-off."""
        why = sourced(self.source, self.why)
        return f"{why} · trade-off: {self.tradeoff}" if self.tradeoff else why


def _setting_rows(
    name: str, setting: _Setting, columns: tuple[int, int], width: int, under_cursor: bool, most: int
) -> list[Strip]:
    """Name, value and reason; the reason in up to ``most`` rows."""
    label = f" {'*' if setting.edited else ' '}{fit(plain(name), columns[0])} "
    value = plain(setting.value)
    text = label + (value if name in FIELDS else fit(value, columns[1]))
    text = fit(text, min(width, cell_len(text)))
    room = width - cell_len(text) - 2
    reasons = [plain(setting.reason)]
    if most > 1 and room >= LEAST_REASON:
        reasons = list(wrapped(reasons[0], room, most)) or [""]
    style, dim = (CURSOR, CURSOR) if under_cursor else (ACCENT if setting.edited else None, DIM)
    strips = [line((text, style), (fit(f"  {fit_words(reasons[0], room)}", max(0, room + 2)), dim))]
    return strips + [line((fit(" " * cell_len(text) + f"  {row}", width), dim)) for row in reasons[1:]]


def _setting(draft: LaunchDraft, plan: Plan | None, name: str) -> _Setting:
    if name not in FIELDS:
        value = draft.value(name)
        out = "unset" if name in draft.edits.base or draft.edits.changed(name) else "no value yet"
        if value is None and name in draft.choices:
            out = "vLLM's choice"
        shown = flag_text(value) if value is not None else out
        return _Setting(draft.edits.changed(name), shown, draft.reason(name), draft.source(name), draft.tradeoff(name))
    if name == "gpus":
        return _gpus_setting(draft, plan)
    text = draft.text(name)
    if text:
        return _Setting(True, text)
    if name == "model":
        return _Setting(False, draft.preset.model)
    resolved = {"engine": plan.engine.label, "host": plan.host, "port": str(plan.port)} if plan else {}
    if name == "name":
        return _Setting(False, f"{CHOSEN[name]} → {draft.planned_name or draft.preset.name}")
    known = resolved.get(name, CHOSEN[name])
    return _Setting(False, CHOSEN[name] if known == CHOSEN[name] else f"{CHOSEN[name]} → {known}")


def _gpus_setting(draft: LaunchDraft, plan: Plan | None) -> _Setting:
    """The chosen set and why; also which GPUs these are, and their problems."""
    chosen = draft.chosen_set
    if isinstance(chosen, str):
        return _Setting(True, f"{chosen}: vLLM chooses")
    if chosen is None:
        best = next((one for one in draft.sets if plan and one.reason == plan.placement), None)
        if best is None:
            return _Setting(False, CHOSEN["gpus"], "" if plan is None else "no GPU assigned")
        return _Setting(False, f"{CHOSEN['gpus']} → {best.reason}", "; ".join([set_devices(best), *best.warnings]))
    return _Setting(True, chosen.reason, "; ".join([set_devices(chosen), *chosen.warnings]))


def _about_setting(draft: LaunchDraft, catalog: FlagCatalog, name: str, setting: _Setting, width: int) -> list[Strip]:
    """What a field or flag is, why it has its value, and the trade-off."""
    if name in FIELDS:
        return [*text_lines(ABOUT[name], width), *text_lines(setting.why, width, DIM)]
    facts = catalog.facts(name)
    if facts is None:
        strips = text_lines(catalog.unknown(name) if name not in draft.preset.flags else "", width, WARN)
    else:
        strips = text_lines(f"{facts.meaning} (vLLM's default: {facts.default})", width)[:2]
        if facts.deprecated:
            strips += text_lines(f"deprecated: {facts.deprecated}", width, WARN)[:1]
    reason = text_lines(sourced(setting.source, setting.why), width, DIM)
    costs = text_lines(f"trade-off: {setting.tradeoff}", width, WARN) if setting.tradeoff else []
    strips += [*(reason[:2] if costs else reason), *costs]
    return strips


def text_lines(
    text: str, width: int, style: Style | None = None, indent: str = " ", first: Sequence[Part] = ()
) -> list[Strip]:
    """A paragraph of at most six lines."""
    return paragraph(text, width, style, indent, first=first, most=6)
