"""Semantic colours and the fallback for terminals without Unicode.

All colours are the terminal's own sixteen, on its own background: they fit a light and a dark terminal alike, cost few
bytes, and never carry a meaning alone (a mark, a word or a number always says the same).
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len
from rich.style import Style
from textual.theme import Theme

OK = Style(color="green")
WARN = Style(color="yellow")
BAD = Style(color="red", bold=True)
DIM = Style(dim=True)
ACCENT = Style(color="cyan")
KEY = Style(color="cyan", bold=True)
STRONG = Style(bold=True)
SIMULATED = Style(color="magenta")
CURSOR = Style(reverse=True)

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

_ASCII = {
    "─": "-", "━": "=", "┄": ".", "│": "|", "┤": "|", "┼": "+", "╭": "+", "╮": "+", "╰": "+", "╯": "+",
    "▸": ">", "●": "*", "·": ".", "…": "~", "→": ">", "←": "<", "↑": "^", "↓": "v", "–": "-", "−": "-",
    "×": "x", "µ": "u", "✓": "+", "✗": "x", "’": "'", "“": '"', "”": '"', "░": ".", "▓": "%",
    "▒": "%", "≡": "=", "╳": "x",
    "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "=", "▍": "-", "▎": "-", "▏": "-",
}  # fmt: skip


class _AsciiTable(dict[int, str]):
    """Maps every character to ASCII of the same width; braille becomes denser marks with more dots."""

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
    """The nearest ASCII text that takes the same number of cells."""
    return text if text.isascii() else text.translate(_TABLE)


def wants_ascii(environment: Mapping[str, str]) -> bool:
    """Whether the terminal's locale says that it cannot show Unicode (``LC_ALL``, ``LC_CTYPE``, ``LANG``)."""
    locale = next((environment[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(name)), "")
    if environment.get("TERM") == "linux":  # the kernel's console has a font of 512 glyphs, braille not among them
        return True
    return bool(locale) and "utf" not in locale.lower().replace("-", "")
