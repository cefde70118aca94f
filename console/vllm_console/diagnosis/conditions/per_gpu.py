"""What rules about the server's GPUs share: a verdict per frame from the looks within it, and words for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm_console.diagnosis.conditions.rule import Situation, Verdict, moments_within
from vllm_console.format import UNKNOWN
from vllm_launchers.machine.gpu.host import Gpu

Judge = Callable[[Gpu], Verdict]


def by_gpu(situation: Situation, judge: Judge) -> list[Verdict]:
    """Per frame the worst that is said of any GPU in more than half of the looks within it."""
    found = []
    for _, moments in moments_within(situation):
        looks = [_worst(judge(gpu) for gpu in moment.gpus) for moment in moments]
        if not looks:
            found.append(Verdict.UNKNOWN)
        elif 2 * looks.count(Verdict.BAD) > len(looks):
            found.append(Verdict.BAD)
        elif all(look is Verdict.GOOD for look in looks):
            found.append(Verdict.GOOD)
        else:
            unknown = all(look is Verdict.UNKNOWN for look in looks)
            found.append(Verdict.UNKNOWN if unknown else Verdict.BETWEEN)
    return found


def _worst(verdicts: Iterator[Verdict]) -> Verdict:
    all_of = list(verdicts)
    order = (Verdict.BAD, Verdict.BETWEEN, Verdict.GOOD)
    return next((verdict for verdict in order if verdict in all_of), Verdict.UNKNOWN)


def newest(situation: Situation, judge: Judge) -> list[Gpu]:
    """The GPUs that a look says it of, as the newest such look saw them: while it ends, later ones are well already."""
    for moment in reversed(situation.moments):
        if found := [gpu for gpu in moment.gpus if judge(gpu) is Verdict.BAD]:
            return found
    return list(situation.moments[-1].gpus) if situation.moments else []


def named(gpus: Sequence[Gpu], one: str, several: str) -> str:
    """``GPU 1 has`` or ``GPUs 1, 3 have``."""
    names = ", ".join(str(gpu.index) for gpu in gpus)
    return f"GPU {names} {one}" if len(gpus) == 1 else f"GPUs {names} {several}"


def gib_text(value: float | None) -> str:
    """``4.7 GiB``."""
    return UNKNOWN if value is None else f"{value:.1f} GiB"
