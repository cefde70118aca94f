"""Finding about requests that the API server refuses: no engine metric shows them."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import setting
from vllm_console.diagnosis.live.frame_sums import MINUTE
from vllm_console.diagnosis.live.rule import Evidence, Judgment, Rule, above
from vllm_console.history.frames import Frame
from vllm_console.logs.refusals import Refusals
from vllm_console.metrics.sample import Responses
from vllm_console.text import percent
from vllm_launchers.vllm.flags.changes import Changes

MOSTLY = 0.5
"""If more than this fraction of the refused requests has a status, that status determines the cause."""

WORTH_MORE_CONTEXT = 1.1
"""Minimum factor for a longer context; less would let few more requests through."""

_KEY = Fix(Changes(), "Give these clients the server's API key. They send it as 'Authorization: Bearer KEY'.")
_READ_ANSWER = Fix(Changes(), "Look at a response in a client: its message says what is wrong with the request.")
_SHORTER = Fix(Changes(), "Send shorter prompts, or ask for fewer output tokens (max_tokens).")


class RequestsRefused(Rule):
    """The API server refuses requests of its clients (4xx)."""

    code = "requests_refused"
    SHARE, ENOUGH, FEWEST = 0.05, 0.02, 5
    """Fractions of a minute's answered requests (holds above, fails below), and the minimum number of refused ones."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge the minute up to each frame."""
        frames = evidence.frames
        return [self._verdict(answered(frames, at), frame) for at, frame in enumerate(frames)]

    def _verdict(self, minute: Responses, frame: Frame) -> Judgment:
        if frame.responses is None:
            return Judgment.UNKNOWN
        if not minute.all_refused:
            return Judgment.OVER
        share = minute.all_refused / minute.total
        if share > self.SHARE and minute.all_refused < self.FEWEST:
            return Judgment.UNCLEAR
        return above(share, self.SHARE, self.ENOUGH)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How many requests were refused, with which status, and why, as far as the log shows it."""
        minute = answered(evidence.frames, len(evidence.frames) - 1)
        refused, total = minute.all_refused, minute.total
        share = percent(refused / total if total else None)
        symptom = f"{refused:,.0f} of {total:,.0f} requests in the last minute were refused (4xx)."
        measures = [
            Measure("refused requests", f"{share} ({refused:,.0f} of {total:,.0f})", percent(self.SHARE), "built-in")
        ]
        logged = evidence.refusals
        measures += [Measure(status, f"{number:,}") for status, number in logged.statuses[:3]]
        measures += [Measure("model asked for", name) for name, _ in logged.models[:2]]
        if logged.longest is not None:
            context = f"{evidence.max_model_len:,}" if evidence.max_model_len is not None else ""
            measures.append(Measure("longest request", f"{logged.longest:,} tokens", context, "max-model-len"))
        cause, fixes = _reason(evidence, logged)
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), tuple(fixes))


def answered(frames: Sequence[Frame], at: int) -> Responses:
    """Responses in the minute up to a frame."""
    ok = refused = failed = unauthorized = 0.0
    for frame in frames[max(0, at + 1 - MINUTE) : at + 1]:
        if (one := frame.responses) is not None:
            ok += one.ok
            refused += one.refused
            failed += one.failed
            unauthorized += one.unauthorized or 0.0
    return Responses(ok, refused, failed, unauthorized)


def _reason(evidence: Evidence, logged: Refusals) -> tuple[str, list[Fix]]:
    if logged.share("401") > MOSTLY:
        return "These requests have no valid API key (401).", [_KEY]
    if logged.share("404") > MOSTLY and logged.models:
        name = logged.models[0][0]
        serves = f"it serves {evidence.model_name}" if evidence.model_name else "it has another name"
        cause = f"They request model {name}, which this server does not serve: {serves}."
        return cause, [_ask_for(evidence.model_name) if evidence.model_name else _READ_ANSWER]
    if logged.share("400") > MOSTLY and logged.too_long:
        limit = f" of {evidence.max_model_len:,} tokens" if evidence.max_model_len is not None else ""
        return f"Prompt and answer together exceed max-model-len{limit}.", _longer_context(evidence, logged)
    if not logged.statuses:
        return "vLLM's log does not show these requests, so the reason is unknown here.", [_READ_ANSWER]
    if logged.share("404") > MOSTLY and evidence.model_name:
        served = evidence.model_name
        cause = f"Most likely they request a model that this server does not serve (404): it serves {served}."
        return cause, [_ask_for(served), _READ_ANSWER]
    advice = _if_too_long(evidence) if logged.statuses[0][0].startswith("400") else None
    cause = f"vLLM answers {logged.statuses[0][0]} and does not log why."
    return cause, [_READ_ANSWER, *([advice] if advice is not None else [])]


def _ask_for(served: str) -> Fix:
    """No flag helps: a flag's value is one word of the command line, and a second name would be another word."""
    return Fix(Changes(), f"Have these clients request {served}.")


def _if_too_long(evidence: Evidence) -> Fix | None:
    """Advice in case the responses report an exceeded context length, which is not known here."""
    now, fitting = evidence.max_model_len, _fitting(evidence)
    if now is None or fitting is None or fitting < WORTH_MORE_CONTEXT * now:
        return None
    return Fix(
        Changes(), f"If the response names the maximum context length: --max-model-len can be up to {fitting:,} here."
    )


def _fitting(evidence: Evidence) -> int | None:
    """The longest context that the model supports and one engine's KV cache holds; None if unknown."""
    held, most = evidence.longest_held, evidence.max_context
    return min(held, most) if held is not None and most is not None else None


def _longer_context(evidence: Evidence, logged: Refusals) -> list[Fix]:
    """A context as long as these requests need, if the model supports it and the KV cache holds it."""
    now, fitting, cache = evidence.max_model_len, _fitting(evidence), evidence.cache_tokens
    if now is None or fitting is None or cache is None:
        return [_SHORTER]
    needed = logged.longest or 2 * now
    longer = now
    while longer < needed:
        longer *= 2
    longer = min(longer, fitting)
    if longer < WORTH_MORE_CONTEXT * now or (logged.longest is not None and longer < logged.longest):
        limit = f"The model's context is {fitting:,} tokens"
        if fitting == evidence.longest_held:
            limit = f"The KV cache holds {cache:,} tokens"
            if now <= cache:  # the present context may be longer than what surely fits after the next start
                limit += f", enough for a context of {max(now, fitting):,}"
        return [Fix(Changes(), f"{limit}. {_SHORTER.why}")]
    why = f"Requests of up to {longer:,} tokens are then served; the model and the KV cache allow it."
    tradeoff = f"One full request can take {percent(longer / cache)} of the KV cache{evidence.each}."
    return [setting("max-model-len", longer, why, tradeoff), _SHORTER]
