"""The model list of the launch screen: local models matching the input, and whether they fit.

While the list is open, models are read and planned in threads, one plan at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace
from textual.dom import DOMNode

from vllm_console.ui.threads import answer_for, begin_worker
from vllm_launchers.errors import OperationError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.model import MemoryFit, fit_of
from vllm_launchers.vllm.model_folder import HUB_ID

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.vllm.modelfacts.local import LocalModel

TYPED = -1
"""The picked index while the input counts instead of a listed model."""


class ModelPicker:
    """The models to choose from. ``screen`` runs workers, ``redraw`` draws changes, ``loaded`` gets the models'
    names."""

    def __init__(
        self, screen: DOMNode, fleet: LocalFleet, redraw: Callable[[], None], loaded: Callable[[Sequence[str]], None]
    ) -> None:
        self._screen, self._fleet, self._redraw, self._loaded = screen, fleet, redraw, loaded
        self._models: Sequence[LocalModel] | None = None
        self._reading = asyncio.Lock()
        self.problems: Sequence[str] = ()
        self.matches: Sequence[LocalModel] = ()
        self.picked = TYPED
        """Index of the match that enter accepts, or `TYPED`."""
        self.fits: dict[str, MemoryFit] = {}
        """Plan results so far, by model."""
        self._request: LaunchRequest | None = None
        self._unchanged = self._text = ""

    @property
    def reading(self) -> bool:
        """Whether models are still being read."""
        return self._models is None

    @property
    def names(self) -> Sequence[str]:
        """The models' names as passed to ``vllm serve``."""
        return [one.model for one in self._models or ()]

    def missing(self, model: str) -> bool:
        """Whether this is a hub id of a model that is known not to be on this machine."""
        return self._models is not None and model not in self.names and HUB_ID.fullmatch(model) is not None

    def forget(self) -> None:
        """Forget the models, which have changed; they are reread when needed."""
        self._models, self.matches, self.fits = None, (), {}

    def open(self, request: LaunchRequest, text: str) -> None:
        """List all models; ``request`` is the launch so far, ``text`` the initial input."""
        request = replace(request, model=None)
        if request != self._request:
            self._request, self.fits = request, {}
        self._unchanged = text
        self.narrow(text)
        begin_worker(self._screen, self._work, "models", "models")

    def close(self) -> None:
        """Stop planning."""
        self._screen.workers.cancel_group(self._screen, "models")

    def narrow(self, text: str) -> None:
        """List models that contain each word of the input; all of them while the input is unchanged."""
        self._text = text
        words = [] if text == self._unchanged else text.lower().split()
        self.matches = [one for one in self._models or () if all(word in one.model.lower() for word in words)]
        self.picked = TYPED

    def step(self, by: int) -> str | None:
        """Pick the next or previous match; return its name, or None if none is picked."""
        self.picked = min(max(TYPED, self.picked + by), len(self.matches) - 1)
        return self.picked_name

    @property
    def picked_name(self) -> str | None:
        """The picked model; None while the input counts."""
        return self.matches[self.picked].model if 0 <= self.picked < len(self.matches) else None

    async def read(self) -> Sequence[LocalModel]:
        """Return the local models; reads them once."""
        async with self._reading:
            if self._models is None:
                found = await answer_for(self._screen, self._fleet.models, "models")
                self._models, self.problems = found.models, found.problems
                self.narrow(self._text)
                self._loaded(self.names)
                self._redraw()
        return self._models

    async def _work(self) -> None:
        """Read the models, then plan them one by one, matches first."""
        try:
            await self.read()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            self.problems = (*self.problems, f"can't read the models of this machine: {error}")
            self._models = ()
            self._redraw()
        while (one := self._next()) is not None:
            try:
                self.fits[one.model] = await answer_for(self._screen, partial(self._plan, one.model), "fit")
            except Exception as error:  # noqa: BLE001 - the thread's boundary: shown beside the model
                self.fits[one.model] = MemoryFit(error=f"no plan: {error}")
            self._redraw()

    def _next(self) -> LocalModel | None:
        known = [one for one in (*self.matches, *(self._models or ())) if one.facts is not None]
        return next((one for one in known if one.model not in self.fits), None)

    def _plan(self, model: str) -> MemoryFit:
        assert self._request is not None
        try:
            return fit_of(self._fleet.plan(replace(self._request, model=model)))
        except OperationError as error:
            return MemoryFit(error=str(error).partition("\n")[0])
