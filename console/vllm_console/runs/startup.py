"""The startups of runs side by side, and the time saved by each measure that shortens them. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

import msgspec

from vllm_console.logs.startup_facts import StartupFacts
from vllm_console.runs.store import Run
from vllm_console.text import UNKNOWN, gib, plain, took
from vllm_launchers.typed_decoding import convert
from vllm_launchers.vllm.fast_loaders import FAST_LOADERS

BEFORE_WEIGHTS = ("process", "imports", "config")
"""Stages that a prepared restart has already completed when it takes over."""

READ_AHEAD = "weights read ahead"
NOTABLE = 0.05
"""Minimum share of the weights that must have been read ahead to count."""

NAME_WIDTH, RUN_WIDTH = 16, 10

_CACHE = {"hit": "hit", "partly": "partly hit", "new": "compiled", "failed": "unusable", "disabled": "off"}


class StartSaving(msgspec.Struct, frozen=True):
    """The effect of a measure: ``seconds`` less (negative: more) than in the start ``before``, which lacked it."""

    measure: str
    seconds: float
    before: Run

    @property
    def sentence(self) -> str:
        """The saving as a sentence: ``compile cache: 21.3s less than chat@1``."""
        more = "less" if self.seconds >= 0 else "more"
        unknown = ", where it is unknown what was cached" if READ_AHEAD in self.measure else ""
        return f"{self.measure}: {took(abs(self.seconds))} {more} than {plain(self.before.name)}{unknown}"


class _Group(msgspec.Struct, frozen=True):
    """Measures that shorten the same part of a start, and the duration of that part; None if unknown."""

    measures: Mapping[str, Callable[[Run], bool]]
    took: Callable[[Run], float | None]
    comparable: Callable[[Run], bool] = lambda _: True


def startup_facts(run: Run) -> StartupFacts:
    """The facts that explain how long a run's start took."""
    try:
        return convert(dict(run.startup), StartupFacts)
    except (TypeError, ValueError):  # from another version
        return StartupFacts()


def last_start_seconds(runs: Sequence[Run]) -> float | None:
    """Duration of the newest completed start, including its preparation while the previous run served.

    ``runs`` are newest first. None if none of them was ever ready.
    """
    for run in runs:
        if run.ready_at is not None:
            return run.ready_at - run.started_at + (startup_facts(run).prepared_seconds or 0.0)
    return None


def saved(run: Run, earlier: Sequence[Run]) -> tuple[StartSaving, ...]:
    """Time saved by each measure of a run, against the newest earlier run of the same model, version and GPUs that had
    no measure for the same part.

    ``earlier`` are runs of its server, newest first. Only where both times are known.
    """
    found = []
    alike = [one for one in earlier if _alike(one, run)]
    for group in _GROUPS:
        names = [name for name, has in group.measures.items() if has(run)]
        took = group.took(run)
        if not names or took is None:
            continue
        for one in alike:
            if any(has(one) for has in group.measures.values()) or not group.comparable(one):
                continue
            if (before := group.took(one)) is not None:
                found.append(StartSaving(" and ".join(names), before - took, one))
                break
    return tuple(found)


def startup_lines(runs: Sequence[Run], width: int) -> list[str]:
    """Stages of a server's newest runs side by side, the newest last, and the time saved.

    ``runs`` are newest first; as many are shown as fit into ``width`` cells.
    """
    started = [run for run in runs if run.stages]
    shown = started[: max(1, (width - NAME_WIDTH) // RUN_WIDTH)][::-1]
    if not shown:
        return []
    times = [{name: took for name, took, _ in run.stages if took is not None} for run in shown]
    longest = max(times, key=len)
    order = [*longest, *dict.fromkeys(name for found in times for name in found if name not in longest)]
    rows = [("", [f"@{run.generation}" for run in shown])]
    rows += [(name, [took(one.get(name)) for one in times]) for name in order]
    rows.append(("until ready", [took(_whole(run)) for run in shown]))
    all_facts = [startup_facts(run) for run in shown]
    rows += [
        (name, cells)
        for name, cells in (
            ("compile cache", [_CACHE.get(one.compile_cache, UNKNOWN) for one in all_facts]),
            ("KV cache size", [_kv_size(one) for one in all_facts]),
            ("prepared in", [took(one.prepared_seconds) for one in all_facts]),
            ("read ahead", [gib(one.read_ahead_gib) for one in all_facts]),
            ("load format", [str(run.flags.get("load-format", UNKNOWN)) for run in shown]),
        )
        if any(cell != UNKNOWN for cell in cells)
    ]
    lines = [_row(name, cells) for name, cells in rows]
    for run in shown:
        for one in saved(run, runs[runs.index(run) + 1 :]):
            lines += textwrap.wrap(
                f"@{run.generation}  {one.sentence}", width, subsequent_indent="    ", break_on_hyphens=False
            )
    return lines


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<{NAME_WIDTH}}" + "".join(f"{plain(cell)[: RUN_WIDTH - 1]:>{RUN_WIDTH}}" for cell in cells)


def _kv_size(found: StartupFacts) -> str:
    if found.kv_pinned:
        return "fixed"
    return "measured" if found.kv_measure_seconds is not None else UNKNOWN


def _whole(run: Run) -> float | None:
    return run.ready_at - run.started_at if run.ready_at is not None and not run.attempts else None


def _alike(one: Run, other: Run) -> bool:
    parallel = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "quantization", "dtype")
    same = (one.server, one.model, one.engine, one.version, one.gpu_kind) == (
        other.server, other.model, other.engine, other.version, other.gpu_kind
    )  # fmt: skip
    return same and one.ready_at is not None and all(one.flags.get(name) == other.flags.get(name) for name in parallel)


def _stage(run: Run, *names: str) -> float | None:
    """Total seconds of these stages; None if none is known."""
    found = [took for name, took, _ in run.stages if name in names and took is not None]
    return sum(found) if found else None


def _downloaded(run: Run) -> bool:
    return any(name == "download" for name, _, _ in run.stages)


def _compile(run: Run) -> float | None:
    known = startup_facts(run).compile_seconds
    return known if known is not None else _stage(run, "compile")


def _read_ahead(run: Run) -> bool:
    """Whether a notable part of its weights was read ahead; weights that were cached anyway don't count."""
    found = startup_facts(run)
    return (found.read_ahead_gib or 0.0) > NOTABLE * (found.weights_gib or 0.0)


def _fast_loader(run: Run) -> bool:
    return run.flags.get("load-format") in FAST_LOADERS


_GROUPS = (
    _Group(
        {"prepared restart": lambda run: startup_facts(run).prepared_seconds is not None},
        lambda run: _stage(run, *BEFORE_WEIGHTS),
    ),
    _Group(
        {
            READ_AHEAD: _read_ahead,
            "load format": _fast_loader,
        },
        lambda run: startup_facts(run).weights_seconds,
        lambda run: not _downloaded(run),
    ),
    _Group(
        {"compile cache": lambda run: startup_facts(run).compile_cache == "hit"},
        _compile,
        lambda run: startup_facts(run).compile_cache in ("new", "failed", "disabled"),
    ),
    _Group(
        {"fixed KV cache size": lambda run: bool(startup_facts(run).kv_pinned)},
        lambda run: startup_facts(run).kv_measure_seconds,
    ),
)
