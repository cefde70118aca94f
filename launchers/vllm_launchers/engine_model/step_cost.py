"""How long an engine's steps take, in a few figures that can be fitted to what a server has shown. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vllm_launchers.engine_model.roofline import MAX_GRAPH_BATCH


class StepCost(msgspec.Struct, frozen=True):
    """A step's duration, in seconds:

        overhead + per_sequence · n + max(weights + per_read · reads, per_token · tokens + per_pair · pairs)

    for ``n`` requests of which ``tokens`` are computed, with the keys and values of ``reads`` tokens read for ``pairs``
    query-key pairs (see `roofline.Work`). The maximum is memory traffic against arithmetic. With prompts it takes
    ``prompts`` more, since their attention is outside the CUDA graphs; above ``graphs`` tokens, for which there are no
    graphs, ``ungraphed`` more.
    """

    overhead: float
    per_sequence: float = 0.0
    per_token: float = 0.0
    per_read: float = 0.0
    weights: float = 0.0
    per_pair: float = 0.0
    ungraphed: float = 0.0
    prompts: float = 0.0
    graphs: int = MAX_GRAPH_BATCH

    def seconds(self, sequences: int, tokens: int, reads: float, pairs: float) -> float:
        """The duration of one step."""
        memory = self.weights + self.per_read * reads
        arithmetic = self.per_token * tokens + self.per_pair * pairs
        fixed = self.overhead if tokens <= self.graphs else self.overhead + self.ungraphed
        if tokens > sequences:
            fixed += self.prompts
        return fixed + self.per_sequence * sequences + (memory if memory > arithmetic else arithmetic)

    def decode_seconds(self, sequences: int, reads: float) -> Iterator[float]:
        """The durations of consecutive steps in which each request gets one token; ``reads`` is the first one's."""
        fixed = self.seconds(sequences, sequences, 0.0, 0.0)
        fixed -= max(self.weights, self.per_token * sequences)
        memory, arithmetic = self.weights + self.per_read * reads, self.per_token * sequences + self.per_pair * reads
        by_memory, by_arithmetic = self.per_read * sequences, self.per_pair * sequences
        while True:
            yield fixed + (memory if memory > arithmetic else arithmetic)
            memory += by_memory
            arithmetic += by_arithmetic

    def scaled(self, factor: float) -> StepCost:
        """Every step takes ``factor`` times as long."""
        seconds = {name: getattr(self, name) * factor for name in self.__struct_fields__ if name != "graphs"}
        return StepCost(**seconds, graphs=self.graphs)


class StepNoise(msgspec.Struct, frozen=True):
    """By how much steps took longer than their cost at a time, of steps that only decode and of those with a prompt:
    the time in seconds, the factor, and how many seconds longer that was; in the order of time. Empty: none.

    After ``span`` seconds a replay begins again with the first; it begins ``shift`` seconds in.
    """

    decode: tuple[tuple[float, float, float], ...] = ()
    prefill: tuple[tuple[float, float, float], ...] = ()
    span: float = 0.0
    shift: float = 0.0


STALLED = 1.5
"""A step that took this many times its cost was held up rather than slow: another one that is held up loses as many
seconds, however long it is."""

NO_NOISE = StepNoise()
