"""The table of ``list`` and the description of ``status``."""

from __future__ import annotations

import argparse
import re
from types import ModuleType

import pytest
from msgspec.structs import replace

from vllm_console.cli.servers import (
    COLUMNS,
    OMITTED_FIRST,
    add_list_arguments,
    describe_server,
    no_energy,
    servers_table,
    status_document,
)
from vllm_console.diagnosis.finding import Cause, Diagnosis, Fix
from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.sample import Sample, Window
from vllm_launchers.host.gpu.host import NO_DRIVER, Host
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Changes

NOW = 2000.0
OURS = ServerView("chat", State.READY, NOW - 42, preset="chatbot", port=8000)
THEIRS = ServerView("vllm@8001", State.READY, NOW - 90, ours=False, owner="anna", port=8001, notice="read-only")
HIDDEN = ServerView("vllm@pid-123456", State.STARTING, NOW - 1655, ours=False, owner="anna", contacted=False)


def test_servers_of_others_take_one_line_with_an_owner_column() -> None:
    heading, ours, theirs, hidden = servers_table((OURS, THEIRS, HIDDEN), NOW)
    assert heading.split()[:4] == ["NAME", "OWNER", "PRESET", "STATE"]
    assert ours.split()[:5] == ["chat", "you", "chatbot", "ready", "42s"]
    assert theirs.split()[:5] == ["vllm@8001", "anna", "–", "ready", "1m30s"]
    assert hidden.split()[0] == "vllm@pid-123456"
    assert [line.index("–") for line in (theirs, hidden)] == [heading.index("PRESET")] * 2, "columns stay aligned"


@pytest.mark.parametrize(
    ("room", "omitted"), [(200, 0), (110, 0), (100, 2), (90, 3), (80, 5), (40, len(OMITTED_FIRST))]
)
def test_narrow_terminal_omits_the_least_important_columns(room: int, omitted: int) -> None:
    lines = servers_table((OURS, THEIRS, HIDDEN), NOW, room)
    titles = set(re.split(r" +(?!p99)", lines[0]))
    assert titles == {title for title, _ in COLUMNS} - {"HOST", *OMITTED_FIRST[:omitted]}
    assert room == 40 or max(map(len, lines)) <= room


def test_server_not_probed_is_running_not_starting() -> None:
    row = servers_table((HIDDEN,), NOW)[1]
    assert "running (unchecked)" in row
    assert "starting" not in row
    assert describe_server(HIDDEN, NOW)[0] == "vllm@pid-123456  running (unchecked)"
    assert describe_server(THEIRS, NOW)[0] == "vllm@8001  ready for 1m30s"


def test_age_of_a_process_is_not_how_long_it_has_been_ready() -> None:
    theirs = replace(THEIRS, since_start=True)
    assert describe_server(theirs, NOW)[0] == "vllm@8001  ready, running for 1m30s"
    assert "1m30s" not in servers_table((OURS, theirs), NOW)[2]


def test_running_tuner_is_shown(fakes: ModuleType) -> None:
    server = fakes.tuned(fakes.NOW)
    sentence = server.tuner.sentence(fakes.NOW)
    assert f"  tuner: {sentence}" in servers_table((server,), fakes.NOW)
    assert f"  tuner       {sentence}" in describe_server(server, fakes.NOW)
    assert " tuning 2/4 " in servers_table((server,), fakes.NOW)[1]
    assert describe_server(server, fakes.NOW)[0] == "chat  tuning 2/4"
    assert status_document(replace(OURS, tuner=server.tuner))["state"] == "ready"
    starting = replace(server, state=State.STARTING)
    assert describe_server(starting, fakes.NOW)[0].startswith("chat  starting for ")
    text = "\n".join(describe_server(server, fakes.NOW))
    assert "preempting (critical, for 5m00s; a tuner is running, pid 4711): " in text
    assert status_document(OURS)["tuner"] is None
    assert status_document(replace(OURS, tuner=server.tuner))["tuner"] == {
        "objective": "goodput",
        "unit": "requests/s",
        "step": "measuring",
        "since": fakes.NOW - 40,
        "until": fakes.NOW + 700,
        "trial": 2,
        "trials": 4,
        "set": {"max-num-seqs": 128, "max-num-batched-tokens": 8192},
        "was": {"max-num-seqs": 256, "max-num-batched-tokens": 2048},
        "pid": 4711,
        "original": {"value": 7.9, "bound": None},
        "best": {"trial": 1, "set": {"max-num-seqs": 128}, "measured": {"value": 9.1, "bound": None}},
    }


def test_exposed_server_of_others_is_reported() -> None:
    warning = "it listens on all addresses (0.0.0.0), no API key seen"
    opened = ServerView(
        "vllm@8001", State.READY, NOW, ours=False, owner="anna", exposed=warning, notice=f"{warning}; read-only"
    )
    assert servers_table((opened,), NOW)[2] == f"  {warning}"


def test_metrics_of_a_silent_server_show_their_age() -> None:
    window = Window(NOW - 100, NOW - 40, requests_running=75, requests_waiting=3, kv_cache_usage=0.19)
    sample = Sample(NOW - 40, {})
    hung = replace(OURS, state=State.UNRESPONSIVE, sample=sample, window=window)
    text = "\n".join(describe_server(hung, NOW))
    assert "75 running, 3 waiting 40s ago" in text
    assert "in the 1m00s before" in text
    assert " now" not in text
    assert servers_table((hung,), NOW)[2] == "  these metrics are 40s old"
    assert status_document(hung)["metrics_at"] == NOW - 40
    fresh = replace(hung, sample=replace(sample, at=NOW - 1))
    assert "75 running, 3 waiting now" in "\n".join(describe_server(fresh, NOW))
    assert len(servers_table((fresh,), NOW)) == 2


def test_failed_server_lists_its_fixes() -> None:
    diagnosis = Diagnosis(Cause.ENGINE_DIED, 0.5, 7, "RuntimeError", "It died.", (Fix(Changes(), "Check 'dmesg'."),))
    failed = replace(OURS, state=State.FAILED, reason="It died.", diagnosis=diagnosis)
    assert describe_server(failed, NOW)[-2:] == ["  fixes       best first", "    Check 'dmesg'."]
    assert "fixes" not in "\n".join(describe_server(replace(failed, state=State.READY), NOW))


def test_unknown_energy_and_cost_have_a_reason() -> None:
    assert no_energy(OURS, Host("vm", problem=NO_DRIVER)).endswith("no NVIDIA driver was found on this machine")
    assert "not given GPUs of its own" in no_energy(OURS, Host("vm"))
    assert "must be alone" in no_energy(replace(OURS, gpus=(0,)), Host("vm"))
    assert [no_energy(one, Host("vm")) for one in (THEIRS, replace(OURS, state=State.STOPPED))] == ["", ""]


def test_help_says_what_the_figures_of_the_table_cover() -> None:
    parser = argparse.ArgumentParser()
    add_list_arguments(parser)
    assert "cover the last minute: TOK/S is the mean" in (parser.description or "")


def test_rates_over_a_second_are_unknown() -> None:
    busy = Window(start=NOW - 60, end=NOW, preemptions_per_minute=7, generation_tokens_per_second=123)
    brief = replace(busy, start=NOW - 1)
    cells = [servers_table((replace(OURS, window=window),), NOW)[1].split() for window in (busy, brief)]
    assert (cells[0][-1], cells[1][-1]) == ("123", "–")
    assert ("7" in cells[0], "7" in cells[1]) == (True, False)
