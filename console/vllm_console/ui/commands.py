"""The command palette, filled from the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

from vllm_console.ui.actions import Action, scoped

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp


class RegistryCommands(Provider):
    """Every action that can be had on the present screen, with its key."""

    @property
    def _console(self) -> ConsoleApp:
        from vllm_console.ui.app import ConsoleApp

        assert isinstance(self.app, ConsoleApp)
        return self.app

    def _actions(self) -> Iterator[Action]:
        read_only = self._console.read_only
        scope = getattr(self.screen, "SCOPE", "")
        yield from scoped(scope, read_only) if scope else ()
        yield from scoped("app", read_only)

    def _runner(self, action: Action) -> Callable[[], object]:
        namespace = "app" if action.scope == "app" else "screen"
        return partial(self.app.run_action, f"{namespace}.{action.id}", self.screen)

    async def discover(self) -> Hits:
        """Everything, before a word is typed."""
        for action in self._actions():
            yield DiscoveryHit(f"{action.title}  ({action.label})", self._runner(action))

    async def search(self, query: str) -> Hits:
        """What matches the words typed."""
        matcher = self.matcher(query)
        for action in self._actions():
            text = f"{action.title}  ({action.label})"
            score = matcher.match(text)
            if score > 0:
                yield Hit(score, matcher.highlight(text), self._runner(action))
