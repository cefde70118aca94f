"""Color roles, color themes, and the ASCII fallback for terminals without Unicode.

Everything is drawn in the terminal's own sixteen colors on its own background. They suit light and dark terminals, cost
few bytes, and are never the only carrier of a meaning: a mark, a word or a number always says the same. Each of the
sixteen stands for a role; a theme replaces them on output.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
from rich.cells import cell_len
from rich.color import Color as RichColor
from rich.color import ColorType
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.theme import Theme

OK = Style(color="green")
WARN = Style(color="yellow")
BAD = Style(color="red", bold=True)
DIM = Style(dim=True)
ACCENT = Style(color="cyan")
KEY = Style(color="cyan", bold=True)
STRONG = Style(bold=True)
SIMULATED = Style(color="magenta")
SECOND = Style()
"""The second line of a chart: the text color, since the other colors are roles."""
CURSOR = Style(reverse=True)
PAST = Style(color="yellow", reverse=True)

CONSOLE_THEME = Theme(
    name="console",
    ansi=True,
    primary="ansi_cyan",
    secondary="ansi_blue",
    warning="ansi_yellow",
    error="ansi_red",
    success="ansi_green",
    accent="ansi_cyan",
    foreground="ansi_default",
    background="ansi_default",
    surface="ansi_default",
    panel="ansi_default",
    boost="ansi_default",
    variables={
        "ansi-background": "ansi_black",
        "ansi-foreground": "ansi_white",
        "border": "ansi_cyan",
        "border-blurred": "ansi_bright_black",
        "block-cursor-foreground": "ansi_black",
        "block-cursor-background": "ansi_cyan",
        "block-hover-background": "ansi_default",
        "input-cursor-background": "ansi_cyan",
        "input-cursor-foreground": "ansi_black",
        "input-selection-background": "ansi_blue",
        "input-selection-foreground": "ansi_white",
        "screen-selection-background": "ansi_blue",
        "screen-selection-foreground": "ansi_white",
        "scrollbar": "ansi_bright_black",
        "scrollbar-hover": "ansi_cyan",
        "scrollbar-active": "ansi_cyan",
        "scrollbar-background": "ansi_default",
        "scrollbar-background-hover": "ansi_default",
        "scrollbar-background-active": "ansi_default",
        "scrollbar-corner-color": "ansi_default",
    },
)


class ColorTheme(msgspec.Struct, frozen=True):
    """The background and role colors of a theme; without a background, the terminal's own colors.

    ``other`` is a further color to tell things apart; ``selection`` is the background of text selected with the mouse.
    """

    title: str
    background: str = ""
    text: str = ""
    dim: str = ""
    accent: str = ""
    warning: str = ""
    critical: str = ""
    ok: str = ""
    simulated: str = ""
    other: str = ""
    selection: str = ""


TERMINAL_THEME = "terminal"

THEMES: Mapping[str, ColorTheme] = {
    TERMINAL_THEME: ColorTheme("The terminal's own colors"),
    "dark": ColorTheme("Dark", "#16181d", "#d7dae0", "#9097a3", "#56c2d6", "#e0b050", "#ff7b72", "#7cc96b", "#c792ea",
                       "#82aaff", "#2f3a4d"),
    "light": ColorTheme("Light", "#fafafa", "#24292f", "#5f6771", "#086a80", "#7d5600", "#b3261e", "#1a6b2d", "#7b3fa0",
                        "#0b57c4", "#cfe0f5"),
    "high-contrast": ColorTheme("High contrast", "#000000", "#ffffff", "#d0d0d0", "#5ffaff", "#ffd700", "#ff8f8f",
                                "#5fff5f", "#ff9fff", "#9fc5ff", "#0038a8"),
    # Textual's colors, those with too little contrast blended with the text color.
    "nord": ColorTheme("Nord", "#2E3440", "#D8DEE9", "#9CA2AD", "#88C0D0", "#EBCB8B", "#C9939C", "#A3BE8C", "#B796B3",
                       "#81A1C1", "#434C5E"),
    "gruvbox": ColorTheme("Gruvbox", "#282828", "#fbf1c7", "#B1AA8F", "#85A598", "#FE8019", "#FB5942", "#B8BB26",
                          "#FABD2F", "#A89A85", "#504945"),
}  # fmt: skip
"""Themes by their name in settings and on the command line."""

_ROLES = (
    "background", "critical", "ok", "warning", "other", "simulated", "accent", "text",
    "dim", "critical", "ok", "warning", "other", "simulated", "accent", "text",
)  # fmt: skip

_BLUE = RichColor.parse("blue")
"""As a background, marks text selected with the mouse."""

_NOT_DIM = Style(dim=False)


class ThemeFilter(LineFilter):
    """Maps the sixteen colors and the default color to a theme."""

    def __init__(self, theme: ColorTheme) -> None:
        super().__init__()
        self._roles = [RichColor.parse(getattr(theme, role)) for role in _ROLES]
        self._text, self._background = RichColor.parse(theme.text), RichColor.parse(theme.background)
        self._dim = RichColor.parse(theme.dim)
        self._selection = RichColor.parse(theme.selection)
        self._plain = Style.from_color(self._text, self._background)
        self._style = lru_cache(2048)(self._themed)

    def apply(self, segments: list[Segment], _background: Color) -> list[Segment]:
        """Return the segments in the theme's colors."""
        plain, themed = self._plain, self._style
        return [Segment(text, plain if style is None else themed(style), control) for text, style, control in segments]

    def _themed(self, style: Style) -> Style:
        color = self._color(style.color, self._text)
        if style.dim:
            color = self._dim if color == self._text else _between(color, self._background)
        behind = self._selection if style.bgcolor == _BLUE else self._color(style.bgcolor, self._background)
        changed = style + Style.from_color(color, behind)
        return changed + _NOT_DIM if style.dim else changed

    def _color(self, color: RichColor | None, default: RichColor) -> RichColor:
        if color is None or color.type is ColorType.DEFAULT:
            return default
        if color.type is ColorType.STANDARD and color.number is not None:
            return self._roles[color.number]
        return color


def _between(color: RichColor, background: RichColor) -> RichColor:
    return Color.from_rich_color(color).blend(Color.from_rich_color(background), 0.35).rich_color


_ASCII = {
    "─": "-", "━": "=", "┄": "-", "┈": "'", "┊": ":", "┬": "+", "┴": "+", "│": "|",
    "┤": "|", "├": "|", "┼": "+", "╭": "+", "╮": "+", "╰": "+", "╯": "+",
    "▸": ">", "●": "*", "·": ".", "…": "~", "→": ">", "←": "<", "↑": "^", "↓": "v", "–": "-", "−": "-",
    "≤": "<", "≥": ">", "±": "~", "°": " ", "\xa0": " ", "↻": "@", "⏎": "<", "•": "*", "╌": "-", "▀": '"',
    "×": "x", "µ": "u", "✓": "+", "✗": "x", "’": "'", "“": '"', "”": '"', "░": ".", "▓": "%",
    "▒": "%", "≡": "=", "╳": "x", "Δ": "d", "‹": "<", "›": ">",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%",
    "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "=", "▍": "-", "▎": "-", "▏": "-",
}  # fmt: skip


class _AsciiTable(dict[int, str]):
    """Maps every character to ASCII of the same width; the more dots a braille character has, the denser its mark."""

    def __missing__(self, code: int) -> str:
        if code < 0x80:
            text = chr(code)
        elif 0x2800 <= code <= 0x28FF:
            text = " ...:::##"[(code - 0x2800).bit_count()]
        else:
            text = "?" * cell_len(chr(code))
        self[code] = text
        return text


_TABLE = _AsciiTable({ord(char): text for char, text in _ASCII.items()})


def to_ascii(text: str) -> str:
    """Return the closest ASCII text of the same width in cells."""
    return text if text.isascii() else text.replace(" → ", "-> ").translate(_TABLE)


class AsciiFilter(LineFilter):
    """Replaces every character on the screen by ASCII of the same width."""

    def apply(self, segments: list[Segment], _background: Color) -> list[Segment]:
        """Return the segments with the same styles and actions."""
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


def wants_ascii(environment: Mapping[str, str]) -> bool:
    """Whether ``TERM``, ``LC_ALL``, ``LC_CTYPE`` or ``LANG`` says that the terminal can't show Unicode."""
    locale = next((environment[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(name)), "")
    if environment.get("TERM") == "linux":  # the kernel console's font has 512 glyphs, none of them braille
        return True
    return bool(locale) and "utf" not in locale.lower().replace("-", "")
