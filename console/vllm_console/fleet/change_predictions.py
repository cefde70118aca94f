"""Predictions of what changed flags would do to our servers, and the kept ones, which are scored later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.fleet.background_commands import StagedPredictions
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_console.fleet.access import ServerAccess
    from vllm_console.fleet.predictions import PredictedChange
    from vllm_console.fleet.runs import RunRecorder
    from vllm_console.fleet.tuning import CandidateRanking, TuneTarget
    from vllm_launchers.keeper.records import ServerRecord
    from vllm_launchers.plan.model import Plan
    from vllm_launchers.vllm.modelfacts.facts import ModelFacts


class ChangePredictions:
    """Predicts changes of our servers by name.

    ``plan`` plans a server's restart with changed flags; ``facts`` reads what is known of its model; ``options`` are
    the `child_options` of a prediction's process.
    """

    def __init__(
        self,
        state: Path,
        access: ServerAccess,
        recorder: RunRecorder,
        plan: Callable[[ServerRecord, Changes], Plan],
        facts: Callable[[Details], ModelFacts | None],
        options: Sequence[str],
    ) -> None:
        self._state, self._access, self._recorder = state, access, recorder
        self._plan, self._facts = plan, facts
        self.staged = StagedPredictions(options)
        """Predictions of staged changes, in a separate process; stores nothing."""

    def predict(self, name: str, changes: Changes, traffic_scale: float = 1.0, *, keep: bool = True) -> PredictedChange:
        """Predict how a restart with changed flags, or ``traffic_scale`` times the request rate, affects a running
        server's own traffic. Takes seconds. With ``keep``, the prediction is stored and scored after the restart.

        Raises:
            OperationError: the server is not up, or too little is recorded.
            NotFoundError, RefusedError: there is no such server, or it is another user's.
        """
        from vllm_console.fleet.predictions import predict_change

        record = self._access.recorded(name, "too little is known of its flags to predict changes")
        plans = self._plan(record, Changes()), self._plan(record, changes)
        facts = self._facts(unpack(record.current.spec.details))
        return predict_change(self._state, record, plans, facts, self._recorder, traffic_scale, keep=keep)

    def rank(self, name: str, target: TuneTarget) -> CandidateRanking:
        """Combinations of batch sizes and memory shares predicted to improve a running server; errors as `predict`."""
        from vllm_console.fleet.tuning import rank_changes

        record = self._access.recorded(name)
        facts = self._facts(unpack(record.current.spec.details))
        return rank_changes(self._state, record, facts, lambda changes: self._plan(record, changes), target)

    def keep(self, name: str, generation: int, prediction: PredictedChange) -> None:
        """Store a staged prediction, to score it after the restart; does nothing if another run has begun.

        Raises:
            OperationError: the run database cannot be read.
            RefusedError: this console is read-only.
        """
        from vllm_console.fleet.predictions import keep_prediction

        record = self._access.adopt_ours(name)
        if prediction.kept is not None and record.current.number == generation:
            keep_prediction(record, self._recorder, prediction.kept)
