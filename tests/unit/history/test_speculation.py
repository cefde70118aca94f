"""Speculative decoding: from ``/metrics`` over the history to the values, the chart and the finding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.history.frames import Frames
from vllm_console.history.store import HistoryReader, HistoryWriter
from vllm_console.history.timeline import Timeline
from vllm_console.metrics.parse import parse_metrics
from vllm_console.metrics.sample import ACCEPTED, Sample
from vllm_console.metrics.window import window, window_document

START = 1_000_000.0
BODY = """\
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.1
vllm:num_preemptions_total{{engine="0",model_name="m"}} 0.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {tokens}
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 0.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="2"}} {third}
"""


def scraped(at: float, drafts: float, first: float, second: float, third: float, running: float = 2.0) -> Sample:
    return parse_metrics(
        BODY.format(
            running=running, tokens=drafts, drafts=drafts, accepted=first + second + third, first=first, second=second,
            third=third,
        ),
        START + at,
    )  # fmt: skip


def minutes(count: int, accepted: float) -> Iterator[Sample]:
    """One sample per second with ten drafts each, of whose first tokens this share is accepted."""
    for at in range(count * 60 + 2):
        yield scraped(at, 10.0 * at, 10.0 * at * accepted, 0.0, 0.0)


def test_drafts_are_counted_by_accepted_tokens() -> None:
    accepted = scraped(0, 231, 54, 23, 22).engines["0"].histograms[ACCEPTED]
    assert accepted.counts == (177.0, 208.0, 209.0, 231.0)
    assert accepted.bounds[:3] == (0.0, 1.0, 2.0)
    assert accepted.sum == 99.0


def test_window_values_match_vllms_log() -> None:
    found = window(scraped(0, 100, 50, 20, 10), scraped(10, 200, 130, 60, 20)).speculation
    assert found is not None
    assert found.drafts_per_second == 10.0
    assert found.acceptance_length == pytest.approx(1 + 130 / 100)
    assert found.by_position == pytest.approx((0.8, 0.4, 0.1))
    document = window_document(window(scraped(0, 100, 50, 20, 10), scraped(10, 200, 130, 60, 20)))
    assert document["speculation"]["by_position"] == pytest.approx((0.8, 0.4, 0.1))


def test_no_drafts_give_no_values() -> None:
    for after in (scraped(10, 100, 50, 20, 10), scraped(0, 200, 50, 20, 10)):
        assert window(scraped(0, 100, 50, 20, 10), after).speculation is None
    without = parse_metrics(BODY.partition("vllm:spec_")[0].format(running=1, tokens=5), START)
    assert ACCEPTED not in without.engines["0"].histograms
    assert window_document(window(without, without))["speculation"] is None


@pytest.mark.parametrize("missing", ["vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per"])
def test_partial_metrics_give_no_values(missing: str) -> None:
    whole = BODY.format(running=1, tokens=5, drafts=9, accepted=6, first=3, second=2, third=1)
    half = "".join(line for line in whole.splitlines(keepends=True) if not line.startswith(missing))
    found = window(parse_metrics(half, START), parse_metrics(half, START + 1))
    assert found.speculation is None


def test_speculation_is_stored_and_charted(tmp_path) -> None:
    writer = HistoryWriter(tmp_path / "history.sqlite")
    charted = Timeline(10.0, 12)
    for sample in minutes(1, 0.5):
        writer.append(sample, 1)
        charted.append(sample, 1)
    writer.close()
    reader = HistoryReader(tmp_path / "history.sqlite")
    kept = [entry.sample for entry in reader.range(START, START + 100)]
    reader.close()
    assert kept[-1].engines["0"].histograms[ACCEPTED].sum == 305.0
    values = [one for one in charted.series().values["acceptance_length"] if one is not None]
    assert values == pytest.approx([1.5] * len(values))
    assert len(values) >= 6


@pytest.mark.parametrize(("accepted", "named"), [(0.04, True), (0.15, False), (0.6, False)])
@pytest.mark.parametrize("flags", [{"speculative-config": '{"method": "ngram"}'}, {}])
def test_rarely_accepted_drafts_are_a_finding(accepted: float, named: bool, flags: dict[str, str]) -> None:
    frames = Frames()
    for sample in minutes(6, accepted):
        frames.append(sample)
    known = frames.since(0)
    evidence = Evidence(now=known[-1].end, ready_at=START - 60, frames=known, flags=flags)
    found = {one.code: one for one in findings(evidence)}
    assert ("drafts_rejected" in found) == named
    if named:
        finding = found["drafts_rejected"]
        assert "up to 3 tokens, of which 0.04 are accepted" in finding.symptom
        assert [fix.changes.unset for fix in finding.fixes] == [("speculative-config",)] * len(flags)


def test_rejected_drafts_persist_through_a_pause() -> None:
    frames = Frames()
    drafted = [*minutes(6, 0.04)][:361]
    for sample in drafted:
        frames.append(sample)
    symptoms = []
    for at in range(370, 670, 10):
        frames.append(scraped(at, 3600.0, 144.0, 0.0, 0.0, running=0.0))
        known = frames.since(0)
        evidence = Evidence(now=known[-1].end, ready_at=START - 60, frames=known, idle_seconds=at - 360.0)
        symptoms.append([one.symptom for one in findings(evidence) if one.code == "drafts_rejected"])
    assert all(len(one) == 1 and "of which 0.04 are accepted" in one[0] for one in symptoms[:-1])
    assert symptoms[-1] == [], "five minutes after the last one"
