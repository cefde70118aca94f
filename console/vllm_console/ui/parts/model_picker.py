"""Choosing a model on the launch screen: the models on this machine, narrowed by what is typed, and which of them fit.

Reading them and planning each happens in threads, one plan after another, while the picker is open.
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
"""The index picked while what is typed counts, and no model of the list."""


class ModelPicker:
    """The models to choose from. ``screen`` runs its workers; ``redraw`` draws what has changed; ``loaded`` is called
    with their names once they are known.
    """

    def __init__(
        self, screen: DOMNode, fleet: LocalFleet, redraw: Callable[[], None], loaded: Callable[[Sequence[str]], None]
    ) -> None:
        self._screen, self._fleet, self._redraw, self._loaded = screen, fleet, redraw, loaded
        self._models: Sequence[LocalModel] | None = None
        self._reading = asyncio.Lock()
        self.problems: Sequence[str] = ()
        self.matches: Sequence[LocalModel] = ()
        """Models that what is typed is found in."""
        self.picked = TYPED
        """Index of the match that enter takes, or `TYPED`."""
        self.fits: dict[str, MemoryFit] = {}
        """The verdicts of plans so far, by model."""
        self._request: LaunchRequest | None = None
        self._unchanged = self._text = ""

    @property
    def reading(self) -> bool:
        """Whether the models are not known yet."""
        return self._models is None

    @property
    def names(self) -> Sequence[str]:
        """What ``vllm serve`` is given for each of them."""
        return [one.model for one in self._models or ()]

    def missing(self, model: str) -> bool:
        """Whether this is the hub id of a model that is not on this machine, as far as its models are known."""
        return self._models is not None and model not in self.names and HUB_ID.fullmatch(model) is not None

    def forget(self) -> None:
        """The models have changed: read them again when they are needed."""
        self._models, self.matches, self.fits = None, (), {}

    def open(self, request: LaunchRequest, text: str) -> None:
        """Offer all models; ``request`` is the launch so far, ``text`` what stands in the entry."""
        request = replace(request, model=None)
        if request != self._request:
            self._request, self.fits = request, {}
        self._unchanged = text
        self.narrow(text)
        begin_worker(self._screen, self._work, "models", "models")

    def close(self) -> None:
        """Plan no more."""
        self._screen.workers.cancel_group(self._screen, "models")

    def narrow(self, text: str) -> None:
        """Keep the models in which each word of the text is found; all of them until it is changed."""
        self._text = text
        words = [] if text == self._unchanged else text.lower().split()
        self.matches = [one for one in self._models or () if all(word in one.model.lower() for word in words)]
        self.picked = TYPED

    def step(self, by: int) -> str | None:
        """The next or previous match; its name, or None where none is picked."""
        self.picked = min(max(TYPED, self.picked + by), len(self.matches) - 1)
        return self.picked_name

    @property
    def picked_name(self) -> str | None:
        """The model under the cursor; None while what is typed counts."""
        return self.matches[self.picked].model if 0 <= self.picked < len(self.matches) else None

    async def read(self) -> Sequence[LocalModel]:
        """The models of this machine, which are read once."""
        async with self._reading:
            if self._models is None:
                found = await answer_for(self._screen, self._fleet.models, "models")
                self._models, self.problems = found.models, found.problems
                self.narrow(self._text)
                self._loaded(self.names)
                self._redraw()
        return self._models

    async def _work(self) -> None:
        """Read the models, then plan one after another, those that match first."""
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
        """The model to be planned next."""
        known = [one for one in (*self.matches, *(self._models or ())) if one.facts is not None]
        return next((one for one in known if one.model not in self.fits), None)

    def _plan(self, model: str) -> MemoryFit:
        assert self._request is not None
        try:
            return fit_of(self._fleet.plan(replace(self._request, model=model)))
        except OperationError as error:
            return MemoryFit(error=str(error).partition("\n")[0])
