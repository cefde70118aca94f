"""``vllm-console predict NAME``: how changed flags would affect a server's own traffic, before a restart."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_changes, add_json, changes_from, number_type
from vllm_console.cli.output import Document, show
from vllm_console.text import UNKNOWN, percent, plain, seconds
from vllm_launchers.errors import UsageError
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import change_text

if TYPE_CHECKING:
    from vllm_console.fleet.predictions import PredictedChange
    from vllm_console.prediction.predict import Estimate, Estimates

LEAST_SCALE, MOST_SCALE = 0.01, 20.0
_LATENCIES = (("ttft_seconds", "TTFT"), ("itl_seconds", "ITL"), ("e2e_seconds", "end to end"))
_PARTS = ("p50", "p90", "p99", "mean")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Predict the effect of changed flags on a running server. The requests that its probe recorded are replayed "
        "through a model of vLLM's scheduler, with step times fitted to this server. Without the probe, they are "
        "reconstructed from metrics, which is less certain."
    )
    parser.add_argument("name")
    add_changes(parser)
    parser.add_argument(
        "--traffic-scale", default=1.0, metavar="X",
        type=number_type(LEAST_SCALE, MOST_SCALE, f"a factor from {LEAST_SCALE:g} to {MOST_SCALE:g}"),
        help=f"scale the request rate by X, from {LEAST_SCALE:g} to {MOST_SCALE:g}",
    )  # fmt: skip
    add_json(parser)
    parser.add_argument("--draft", action="store_true", help="run at low priority, and do not store the prediction")


def run(args: argparse.Namespace) -> int:
    """Print the prediction; exit code 1 if there is none."""
    changes = changes_from(args)
    if changes.empty and args.traffic_scale == 1:
        raise UsageError("name a change with --set FLAG=VALUE, --unset FLAG or --traffic-scale X")
    if args.draft:
        os.nice(10)  # a user is watching a screen meanwhile
    found = open_fleet(args).predictions.predict(args.name, changes, args.traffic_scale, keep=not args.draft)
    if args.draft:
        print(msgspec.json.encode(found).decode())
    else:
        show(args, lambda: prediction_document(found), lambda: _lines(args.name, found))
    return 1 if found.prediction.predicted.ttft_seconds.p50.value is None else 0


def prediction_document(found: PredictedChange) -> Document:
    """The prediction as JSON; null means unknown."""
    record = found.record
    return {
        "changed": [{"flag": one.flag, "before": one.before, "after": one.after} for one in found.changed],
        "now": _figures(found.prediction.now),
        "predicted": _figures(found.prediction.predicted),
        "evidence": {"requests": found.requests, "minutes": round(found.minutes, 2), "source": found.source},
        "track_record": {
            "predictions": record.predictions,
            "median_error": record.median_error,
            "covered": record.covered,
        },
        "outside": found.prediction.outside or None,
    }


def _figures(estimates: Estimates) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, _ in _LATENCIES:
        spread = getattr(estimates, name)
        document[name] = {part: _estimate(getattr(spread, part)) for part in _PARTS}
    document |= {name: getattr(estimates, name).value for name in _RATES}
    return document


def _estimate(one: Estimate) -> dict[str, float | None]:
    return {"value": one.value, "low": one.low, "high": one.high}


# -- for people --------------------------------------------------------------------------------------------------------


def _lines(name: str, found: PredictedChange) -> Iterator[str]:
    from vllm_console.fleet.predictions import METRICS

    prediction = found.prediction
    shown = ", ".join(plain(change_text(one.flag, one.before, one.after)) for one in found.changed)
    yield f"{plain(name)}: {shown}"
    source = "reconstructed from its metrics" if found.source == METRICS else found.source
    yield f"from {found.requests:,} requests in {found.minutes:.1f} min, {source}"
    yield f"NOW: measured over these {found.minutes:.1f} min; 'status' shows the last minute"
    yield ""
    if all(getattr(prediction.predicted, key).mean.value is None for key, _ in _LATENCIES):
        yield prediction.outside or "Not predicted: in the replay no recorded request would be served."
        return
    flagged = bool(prediction.outside)
    yield f"  {'':<22}{'NOW':>10}{'PREDICTED':>12}   90% INTERVAL"
    for key, title in _LATENCIES:
        now, then = getattr(prediction.now, key), getattr(prediction.predicted, key)
        for part in _PARTS:
            yield _row(f"{title} {part}", getattr(now, part), getattr(then, part), seconds, flagged)
    for key, (title, form) in _RATES.items():
        yield _row(title, getattr(prediction.now, key), getattr(prediction.predicted, key), form, flagged)
    yield ""
    yield from _unknown(prediction.now, prediction.predicted)
    yield prediction.outside or _sentence(prediction.now, prediction.predicted)
    record = found.record
    if record.median_error is not None and record.covered is not None:
        yield (
            f"Of {counted(record.predictions, 'earlier prediction')} here the median error was "
            f"{record.median_error:.0%}, and {record.covered:.0%} of the measurements were within the interval."
        )
    if found.drift is not None:
        slower = "slower" if found.drift > 0 else "faster"
        yield f"After the last predicted restart the same steps were {abs(found.drift):.0%} {slower} than before it."


def _unknown(now: Estimates, then: Estimates) -> Iterator[str]:
    """Why figures are missing, one line per reason."""
    from vllm_console.prediction.figures import FEWEST_FOR

    sides, needed = (now, then), dict[str, str]()
    for keys, of in ((("ttft_seconds", "e2e_seconds"), "requests"), (("itl_seconds",), "inter-token intervals")):
        found = [spread for one in sides for key in keys if (spread := getattr(one, key)).mean.value is not None]
        for part, fewest in FEWEST_FOR.items():
            if any(one.value is None and one.high is None for one in (getattr(spread, part) for spread in found)):
                needed.setdefault(part, f"{part} needs {fewest} {of}")
    if needed:
        yield f"{UNKNOWN}: {', '.join(needed.values())}."
    if any(one.itl_seconds.mean.value is None for one in sides):
        yield f"{UNKNOWN}: ITL needs answers of more than one token."
    if missing := [
        title for key, (title, _) in _RATES.items() if any(getattr(one, key).value is None for one in sides)
    ]:
        yield f"{UNKNOWN}: {' and '.join(missing)} not reported in the records of the engine's steps."


def _row(title: str, now: Estimate, then: Estimate, form: Any, flagged: bool) -> str:
    """A line of the table; in words if the interval is too wide or the prediction is ``flagged``."""
    from vllm_console.prediction.effect import in_words, is_rough

    interval = "" if then.low is None or then.high is None else f"{form(then.low)} to {form(then.high)}"
    present = f"<{form(now.high)}" if now.value is None and now.high is not None else form(now.value)
    if interval and now.value is not None and (flagged or is_rough(now, then)):
        return f"  {title:<22}{present:>10}   {in_words(now, then)}"
    return f"  {title:<22}{present:>10}{form(then.value):>12}   {interval}".rstrip()


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


_RATES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "tokens_per_second": ("tokens/s", _count),
    "requests_waiting": ("requests waiting", _count),
    "preemptions_per_minute": ("preemptions/min", _count),
    "kv_cache_usage": ("KV cache usage", percent),
}
"""The other figures, each with its title and formatter."""


def _sentence(now: Estimates, then: Estimates) -> str:
    """One sentence on the certain changes: those whose interval does not contain the current value."""
    from vllm_console.prediction.effect import in_words, is_rough

    pairs = [(title, getattr(now, key).p50, getattr(then, key).p50) for key, title in _LATENCIES]
    pairs.append(("tokens per second", now.tokens_per_second, then.tokens_per_second))
    parts, unsure = [], False
    for title, before, after in pairs:
        if after.low is None or after.high is None:
            continue
        unsure = unsure or is_rough(before, after)
        if before.value and after.value is not None and not after.low <= before.value <= after.high:
            middle = "" if title == "tokens per second" else "the median "
            if is_rough(before, after):
                parts.append(f"{middle}{title} would be {in_words(before, after)}")
                continue
            share = after.value / before.value - 1
            by = f"{abs(share):.0%}" if share < 1 else f"{after.value / before.value:.1f} times"
            word = f"rise by {by}" if 0 < share < 1 else f"be {by} as high" if share >= 1 else f"fall by {by}"
            parts.append(f"{middle}{title} would {word}")
    if not parts and unsure:
        return "No change is certain: the intervals contain the current medians. More requests would narrow them."
    if not parts:
        return "No figure would change by more than the normal variation of machine and traffic."
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
