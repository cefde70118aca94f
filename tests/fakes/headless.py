"""Skip work for apps without a terminal, a quarter of the time of screen tests.

- No frame is drawn, because none reaches a terminal: a test draws what it reads. The final screen of a test is drawn as
  well, so that errors in drawing are found even if only states are asserted.
- Each style sheet is parsed once per process for all apps.
"""

from __future__ import annotations

from typing import Any

import pytest
from textual._compositor import Compositor
from textual._context import visible_screen_stack
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

_parse_rules = Stylesheet._parse_rules
_render_update = Compositor.render_update
_shutdown = App._shutdown

_parsed: dict[tuple[Any, ...], list[RuleSet]] = {}


def _rules_of(sheet: Stylesheet, css: str, **options: Any) -> list[RuleSet]:
    """The rules in ``css``, with the sheet's variables resolved. They can be shared because nothing modifies them
    later."""
    key = (css, *options.items(), *sheet._variables.items())
    if key not in _parsed:
        _parsed[key] = _parse_rules(sheet, css, **options)
    return _parsed[key]


def _no_frame(
    compositor: Compositor, full: bool = False, screen_stack: list[Any] | None = None, simplify: bool = False
) -> Any:
    """Draw nothing unless a full frame is requested for a screenshot."""
    if full:
        return _render_update(compositor, full, screen_stack, simplify)
    visible_screen_stack.set(screen_stack or [])
    compositor._dirty_regions.clear()
    return None


async def _shutdown_drawn(app: App[Any]) -> None:
    try:
        if app.screen_stack and app.screen.size:
            app.screen._compositor.render_strips()
    finally:
        await _shutdown(app)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compositor, "render_update", _no_frame)
    monkeypatch.setattr(App, "_shutdown", _shutdown_drawn)


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stylesheet, "_parse_rules", _rules_of)
