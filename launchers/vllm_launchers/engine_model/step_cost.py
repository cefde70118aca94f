"""The duration of an engine's steps, in a few figures that can be fitted to a server's behavior. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vllm_launchers.engine_model.roofline import MAX_GRAPH_BATCH


class StepCost(msgspec.Struct, frozen=True):
    """A step's duration, in seconds:

        overhead + per_sequence · n + max(weights + per_read · reads, per_token · tokens + per_pair · pairs)

    for ``n`` requests of which ``tokens`` are computed, reading the keys and values of ``reads`` tokens for ``pairs``
    query-key pairs (see `roofline.Work`). The maximum is over memory traffic and arithmetic. A step with prompts takes
    ``prompts`` longer, since their attention is outside the CUDA graphs; one with more than ``graphs`` tokens, for
    which there are no graphs, takes ``ungraphed`` longer.
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
        """Durations of consecutive steps in which each request gets one token; ``reads`` is that of the first step."""
        fixed = self.seconds(sequences, sequences, 0.0, 0.0)
        fixed -= max(self.weights, self.per_token * sequences)
        memory, arithmetic = self.weights + self.per_read * reads, self.per_token * sequences + self.per_pair * reads
        by_memory, by_arithmetic = self.per_read * sequences, self.per_pair * sequences
        while True:
            yield fixed + (memory if memory > arithmetic else arithmetic)
            memory += by_memory
            arithmetic += by_arithmetic

    def scaled(self, factor: float) -> StepCost:
        """The cost if every step takes ``factor`` times as long."""
        seconds = {name: getattr(self, name) * factor for name in self.__struct_fields__ if name != "graphs"}
        return StepCost(**seconds, graphs=self.graphs)


class StepNoise(msgspec.Struct, frozen=True):
    """How much longer than their cost steps took over time, separately for decode-only steps and steps with a prompt.

    Each entry is the time in seconds, the factor, and the additional seconds, in order of time. Empty means no noise. A
    replay starts at ``shift`` seconds and repeats after ``span`` seconds.
    """

    decode: tuple[tuple[float, float, float], ...] = ()
    prefill: tuple[tuple[float, float, float], ...] = ()
    span: float = 0.0
    shift: float = 0.0


STALLED = 1.5
"""At this multiple of its cost a step was stalled rather than slow; a stall adds seconds, however long the step is."""

NO_NOISE = StepNoise()
