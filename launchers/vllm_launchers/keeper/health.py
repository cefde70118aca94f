"""What a server's probes come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from vllm_launchers.keeper.events import Probed
from vllm_launchers.keeper.lifecycle import Transition, Tuning
from vllm_launchers.keeper.members import port_is_theirs
from vllm_launchers.keeper.records import ProcessIdentity, State


class Health:
    """Counts failed probes in a row, and takes a first good answer only from the server's own processes."""

    def __init__(self, tuning: Tuning) -> None:
        self._limit = tuning.silent_probes
        self.reset()

    def reset(self) -> None:
        """A new process: forget the one before."""
        self._silent = 0
        self._looked_at = 0.0
        self.since = time.monotonic()
        """When it last began or ceased to answer, on a clock that nobody sets."""
        self.reason = ""
        """Why the last probe led where it did, or why it did not count; a clause for people."""

    def heard(
        self, probed: Probed, state: State, port: int, members: Callable[[], Iterable[ProcessIdentity]]
    ) -> Transition | None:
        """The transition that a probe causes in this state, if any."""
        if not probed.healthy:
            self._silent += 1
            if state is not State.READY or self._silent < self._limit:
                return None
            self.reason = f"/health on port {port}: {probed.detail}, {self._silent} times in a row"
            self.since = time.monotonic()
            return Transition.FELL_SILENT
        self._silent = 0
        if state is State.READY or not self._ours(port, members):
            return None
        self.reason = ""
        self.since = time.monotonic()
        return Transition.ANSWERED if state is State.STARTING else Transition.SPOKE_AGAIN

    def _ours(self, port: int, members: Callable[[], Iterable[ProcessIdentity]]) -> bool:
        """Whether our server listens on the port; where that cannot be seen it is taken to be so."""
        now = time.monotonic()
        if self.reason and now - self._looked_at < 1.0:
            return False  # a stranger answers; look again in a while
        self._looked_at = now
        if port_is_theirs(port, members()) is not False:
            return True
        self.reason = f"port {port} is answered by a process that is not this server's"
        return False
