"""Themes only change colors; terminals that can't show them keep their own."""

from __future__ import annotations

import msgspec
import pytest
from rich.segment import Segment
from rich.style import Style
from textual.color import Color

from vllm_console.settings import Config
from vllm_console.ui import theme as roles
from vllm_console.ui.theme import TERMINAL_THEME, THEMES, ThemeFilter, to_ascii

WITH_COLORS = {name: theme for name, theme in THEMES.items() if name != TERMINAL_THEME}
LEGIBLE = 4.5
"""Minimum contrast between text and background (WCAG 2.2, AA)."""
ROLES = ("text", "dim", "accent", "warning", "critical", "ok", "simulated", "other")


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that supports all colors."""
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return monkeypatch


def contrast(one, other):
    """The contrast ratio of two colors as defined by WCAG, from 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color):
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in Color.parse(color).normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def colors(c):
    styles = [style for strip in c.app.screen._compositor.render_strips() for _, style, _ in strip if style is not None]
    return {str(color.name) for style in styles for color in (style.color, style.bgcolor) if color is not None}


def test_settings_know_every_theme():
    schema = msgspec.json.schema(Config)["$defs"]["Config"]["properties"]
    assert set(schema["theme"]["enum"]) == set(THEMES)


@pytest.mark.parametrize("name", WITH_COLORS)
def test_every_role_can_be_read(name):
    theme = WITH_COLORS[name]
    least = 7.0 if name == "high-contrast" else LEGIBLE
    for role in ROLES:
        assert contrast(getattr(theme, role), theme.background) >= least, role
    assert contrast(theme.text, theme.selection) >= LEGIBLE


def test_roles_become_the_themes_colors_and_texts_stay():
    theme = THEMES["nord"]
    styles = {
        "text": None, "ok": roles.OK, "warning": roles.WARN, "critical": roles.BAD, "accent": roles.ACCENT,
        "dim": roles.DIM, "simulated": roles.SIMULATED,
    }  # fmt: skip
    found = ThemeFilter(theme).apply([Segment(role, style) for role, style in styles.items()], Color(0, 0, 0))
    assert [text for text, _, _ in found] == list(styles)
    for role, style, _ in found:
        assert style.color.name == getattr(theme, role).lower(), role
        assert style.bgcolor.name == theme.background.lower()
        assert not style.dim
    assert found[3].style.bold


def test_what_is_dim_and_colored_keeps_its_color_but_less_of_it():
    ((_, style, _),) = ThemeFilter(THEMES["dark"]).apply([Segment("a", roles.ACCENT + roles.DIM)], Color(0, 0, 0))
    assert style.color.name not in (THEMES["dark"].accent, THEMES["dark"].dim)
    assert not style.dim


def test_a_selection_stands_on_the_themes_own_background():
    ((_, style, _),) = ThemeFilter(THEMES["light"]).apply([Segment("a", Style(bgcolor="blue"))], Color(0, 0, 0))
    assert style.bgcolor.name == THEMES["light"].selection


async def test_a_theme_is_chosen_by_key_and_by_command_and_left_again(console, terminal):
    async with console() as c:
        assert not any(name.startswith("#") for name in colors(c))
        text = [row for row in c.text.splitlines() if "chat " in row and "ready" in row]
        await c.press("T")
        await c.sees('Theme dark. To keep it: theme = "dark" in config.toml.')
        assert THEMES["dark"].background in colors(c)
        assert not {"green", "red", "yellow", "cyan", "default"} & colors(c)
        assert [row for row in c.text.splitlines() if "chat " in row and "ready" in row] == text
        await c.press("colon", *"theme nord", "enter")
        await c.sees("Theme nord.")
        assert THEMES["nord"].background.lower() in colors(c)
        await c.press("question_mark")
        await c.sees("Help: keys")
        assert THEMES["nord"].background.lower() in colors(c)
        await c.press("escape", "colon", *"theme terminal", "enter")
        await c.sees("Theme terminal.")
        assert not any(name.startswith("#") for name in colors(c))


async def test_a_terminal_with_16_colors_keeps_its_own(console, terminal):
    terminal.delenv("COLORTERM")
    terminal.setenv("TERM", "xterm")
    async with console(theme="nord") as c:
        assert not any(name.startswith("#") for name in colors(c))
        await c.press("T")
        await c.sees("Theme dark is not used: this terminal has 16 colors (TERM=xterm).")
        await c.press("colon", *"theme nord", "enter")
        await c.sees("Theme nord is not used: this terminal has 16 colors")
        assert not any(name.startswith("#") for name in colors(c))


async def test_no_color_wins(console, terminal):
    terminal.setenv("NO_COLOR", "1")
    async with console(theme="gruvbox") as c:
        await c.press("T")
        await c.sees("Theme dark is not used: NO_COLOR is set.")
        assert colors(c) <= {"default"}


@pytest.mark.parametrize("text", ["34°C", "ITL p99 ≤ 100ms", "longest ≥ 12s", "±0 to +145%", "↻", "18 µs × 2 → 3 – …"])
def test_every_sign_of_the_console_has_ascii_in_its_place(text):
    shown = to_ascii(text)
    assert shown.isascii()
    assert "?" not in shown
    assert len(shown) == len(text)
