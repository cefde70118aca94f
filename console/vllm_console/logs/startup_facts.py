"""What made a start short or long, read from its log: compile cache, memory profiling, weights, what was prepared.

For vLLM 0.8 to 0.33. Pure.
"""

from __future__ import annotations

import re

from vllm_console.metrics.sample import StartupFacts

_LINE = re.compile(
    r"(?P<loaded>Directly load (?:AOT compilation|the compiled graph))|(?P<compiled>Compiling a graph for )"
    r"|(?P<failed>Compiling model again due to a load failure|Cannot load aot compilation from)"
    r"|(?P<saved>saved AOT compiled function to)|(?P<disabled>torch\.compile cache is disabled)"
    r"|torch\.compile (?:took|takes) (?P<compile>\d+(?:\.\d+)?) s in total"
    r"|Loading weights took (?P<weights>\d+(?:\.\d+)?) seconds"
    r"|(?P<profiled>Initial profiling/warmup run took)|(?P<available>Available KV cache memory:)"
    r"|(?P<pinned>specified by kv_cache_memory_bytes config and skipped memory profiling)"
    r"|(?P<planned>Applying persisted startup plan)"
    r"|prepared for a restart in (?P<prepared>\d+(?:\.\d+)?) s"
    r"|weights read ahead: (?P<read>\d+(?:\.\d+)?) of (?P<size>\d+(?:\.\d+)?) GiB"
)


class FactReader:
    """Collects the facts line by line. Of several workers, the slowest counts."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}
        self._compile: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._profiled_at: float | None = None
        self._measured: float | None = None

    def line(self, process: str, text: str, at: float) -> None:
        """Process the message of one line; ``at`` is its time or that of the last line with one (Unix seconds)."""
        found = _LINE.search(text)
        if found is None:
            return
        said = {name: value for name, value in found.groupdict().items() if value is not None}
        self._seen.update(said)
        if "compile" in said:  # a model of several parts reports each
            self._compile[process] = self._compile.get(process, 0.0) + float(said["compile"])
        elif "weights" in said:  # as does one with a draft model
            self._weights[process] = self._weights.get(process, 0.0) + float(said["weights"])
        elif "profiled" in said:
            self._profiled_at = at
        elif {"available", "pinned"} & said.keys() and self._profiled_at is not None:
            self._measured = max(self._measured or 0.0, at - self._profiled_at)

    @property
    def facts(self) -> StartupFacts:
        """What is known so far."""
        seen = self._seen

        def number(name: str) -> float | None:
            return float(seen[name]) if name in seen else None

        return StartupFacts(
            compile_cache=self._cache(),
            compile_seconds=max(self._compile.values(), default=None),
            weights_seconds=max(self._weights.values(), default=None),
            kv_measure_seconds=self._measured,
            kv_pinned="plan" if "planned" in seen else "flag" if "pinned" in seen else "",
            prepared_seconds=number("prepared"),
            read_ahead_gib=number("read"),
            weights_gib=number("size"),
        )

    def _cache(self) -> str:
        seen = self._seen
        if "disabled" in seen:
            return "disabled"
        if "failed" in seen and "loaded" not in seen:
            return "failed"
        if "compiled" in seen:
            return "partly" if "loaded" in seen else "new"
        return "hit" if "loaded" in seen else "new" if "saved" in seen else ""
