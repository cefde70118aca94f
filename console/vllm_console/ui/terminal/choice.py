"""Choose what the console draws on: the terminal, or the driver in ``TEXTUAL_DRIVER``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from textual.driver import Driver

from vllm_console.text import plain
from vllm_console.ui.terminal.driver import ConsoleDriver
from vllm_launchers.errors import UsageError

_BROWSER = "textual.drivers.web_driver:WebDriver"
"""The name that `vllm-console web` and textual-serve use for a browser page."""


def in_browser(environment: Mapping[str, str]) -> bool:
    """Whether the console is shown on a browser page."""
    return environment.get("TEXTUAL_DRIVER") == _BROWSER


def driver_class(environment: Mapping[str, str]) -> type[Driver]:
    """The driver the console draws with: for a terminal, or as named by ``TEXTUAL_DRIVER``, such as for textual-serve.

    Raises:
        UsageError: it does not name a driver.
    """
    named = environment.get("TEXTUAL_DRIVER", "")
    if not named:
        return ConsoleDriver
    if named == _BROWSER:
        from vllm_console.ui.terminal.browser import BrowserDriver

        return BrowserDriver
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"TEXTUAL_DRIVER={plain(named, 80)}: {plain(str(error), 200)}; unset it") from error
    if not isinstance(found, type) or not issubclass(found, Driver):
        raise UsageError(f"TEXTUAL_DRIVER={plain(named, 80)} is not a Textual driver; unset it")
    return found
