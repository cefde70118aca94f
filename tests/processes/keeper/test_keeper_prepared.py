"""A restart prepared while the server serves: handed over, rejected, canceled, discarded, rolled back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from fakes.keeper_bench import TUNING
from vllm_launchers.keeper import client, errors, folders, processes
from vllm_launchers.keeper.records import PreparationStep, State
from vllm_launchers.values import replace

IMPORTED, ACCEPTED = {"say": {"step": "imported"}}, {"say": {"step": "accepted"}}


@pytest.fixture
def prepared(bench):
    """A spec whose process follows ``script`` during preparation."""

    def spec(port, *script, options=(), **fields):
        plain = bench.spec(*options, port=port, **fields)
        words = (*plain.argv, "--prepared", json.dumps(script))
        return replace(plain, prepared_argv=words)

    return spec


def descendants(keeper):
    return processes.descendants(processes.table(), [keeper.pid])


def preparing(record):
    return record.preparation is not None and record.preparation.step.under_way and record.preparation.process


def test_server_serves_until_prepared_process_takes_over(bench, prepared, tmp_path):
    before = bench.ready(bench.spec())
    gate = tmp_path / "gate"
    spec = prepared(before.current.spec.port, {"print": "loading"}, IMPORTED, {"wait": str(gate)}, ACCEPTED)
    bench.restart(spec)
    during = bench.until(lambda record: record.preparation and record.preparation.step is PreparationStep.CHECKING)
    assert during.state is State.READY
    assert during.server == before.server
    assert processes.alive(before.server)
    next_process = during.preparation.process
    gate.touch()
    after = bench.wait(State.READY, generation=2)
    assert after.server == next_process
    assert not processes.alive(before.server)
    assert after.preparation is None
    assert after.downtime_seconds > 0
    assert after.current.spec == spec
    assert "loading" in bench.log()
    assert bench.stopped().exit.code == 0  # it is the keeper's child
    assert not processes.alive(next_process)


@pytest.mark.parametrize("prints", ["", "vllm: error: unrecognized arguments: --no-such-flag"])
def test_rejected_flags_cancel_restart_without_affecting_server(bench, prepared, wait_until, prints):
    before = bench.ready(bench.spec("--tick", "0.02"))
    refused = {"say": {"step": "refused", "message": "unrecognized arguments: --no-such-flag"}}
    bench.restart(prepared(before.current.spec.port, {"print": prints}, IMPORTED, refused, {"exit": 2}))
    after = bench.until(lambda record: record.preparation and not record.preparation.step.under_way)
    assert after.preparation.step is PreparationStep.REFUSED
    assert after.preparation.message == "unrecognized arguments: --no-such-flag"
    assert after.preparation.output.strip() == prints
    assert after.state is State.READY
    assert after.server == before.server
    assert after.current.number == 1
    assert after.state_since == before.state_since
    wait_until(lambda: descendants(after.keeper) == {after.server.pid}, "the end of the prepared process")


def test_exit_during_preparation_cancels_restart(bench, prepared):
    before = bench.ready(bench.spec())
    bench.restart(prepared(before.current.spec.port, {"print": "Killed"}, {"exit": 137}))
    after = bench.until(lambda record: record.preparation and not record.preparation.step.under_way)
    assert after.preparation.step is PreparationStep.FAILED
    assert "ended" in after.preparation.message
    assert after.state is State.READY
    assert after.server == before.server


def test_missing_program_cancels_restart(bench, prepared):
    before = bench.ready(bench.spec())
    spec = prepared(before.current.spec.port)
    after = bench.restart(replace(spec, prepared_argv=("/no/such/python",)))
    assert after.preparation.step is PreparationStep.FAILED
    assert "/no/such/python" in after.preparation.message
    assert after.state is State.READY
    assert after.server == before.server


def test_unsupported_preparation_falls_back_to_plain_restart(bench, prepared):
    before = bench.ready(bench.spec())
    script = ({"say": {"step": "unprepared", "message": "no module named cli"}}, {"exit": 3})
    bench.restart(prepared(before.current.spec.port, *script))
    after = bench.wait(State.READY, generation=2)
    assert after.preparation.step is PreparationStep.UNPREPARED
    assert after.preparation.message == "no module named cli"


def test_restart_can_be_canceled_until_handover(bench, prepared, wait_until):
    before = bench.ready(bench.spec())
    bench.restart(prepared(before.current.spec.port, {"hang": True}))
    process = bench.until(preparing).preparation.process
    client.cancel(bench.root, "one")
    after = bench.read()
    assert after.preparation.step is PreparationStep.CANCELED
    assert after.preparation.process is None
    assert after.state is State.READY
    assert after.server == before.server
    wait_until(lambda: not processes.alive(process), "its end")
    with pytest.raises(errors.NotPreparingError):
        client.cancel(bench.root, "one")


def test_restart_is_canceled_when_requesting_console_ends(bench, prepared, wait_until):
    before = bench.ready(bench.spec())
    spec = prepared(before.current.spec.port, {"hang": True})
    asking = (
        "import json, sys; from pathlib import Path; from vllm_launchers.keeper import client, wire\n"
        "from vllm_launchers.keeper.records import LaunchSpec\n"
        "spec = wire.from_plain(LaunchSpec, json.loads(sys.argv[2]))\n"
        "client.restart(Path(sys.argv[1]), 'one', spec)"
    )
    words = [sys.executable, "-c", asking, str(bench.root), json.dumps(client.wire.to_plain(spec))]
    subprocess.run(words, check=True)
    after = bench.until(lambda record: record.preparation and record.preparation.step is PreparationStep.CANCELED)
    assert "console" in after.preparation.message
    assert after.server == before.server
    wait_until(lambda: descendants(after.keeper) == {after.server.pid}, "the end of the prepared process")


def test_second_restart_replaces_the_first(bench, prepared, wait_until):
    before = bench.ready(bench.spec())
    port = before.current.spec.port
    bench.restart(prepared(port, {"hang": True}))
    first = bench.until(preparing).preparation
    bench.restart(prepared(port, IMPORTED, ACCEPTED, options=("--tick", "5")))
    after = bench.wait(State.READY, generation=2)
    assert "--tick" in after.current.spec.argv
    wait_until(lambda: not processes.alive(first.process), "the end of the first one")
    assert len(after.generations) == 2


def test_stop_discards_prepared_process(bench, prepared, wait_until):
    before = bench.ready(bench.spec())
    bench.restart(prepared(before.current.spec.port, {"hang": True}))
    process = bench.until(preparing).preparation.process
    after = bench.stopped()
    assert after.preparation.step is PreparationStep.CANCELED
    assert len(after.generations) == 1
    wait_until(lambda: not processes.alive(process), "its end")


def test_server_exit_during_preparation_restarts_immediately(bench, prepared, wait_until):
    before = bench.ready(bench.spec())
    bench.restart(prepared(before.current.spec.port, {"hang": True}))
    process = bench.until(preparing).preparation.process
    processes.send(before.server, signal.SIGKILL)
    after = bench.wait(State.READY, generation=2)
    assert after.preparation.step is PreparationStep.UNPREPARED
    wait_until(lambda: not processes.alive(process), "its end")


def test_prepared_process_dies_with_keeper_and_is_reported(bench, prepared, wait_until):
    before = bench.ready(bench.spec())
    bench.restart(prepared(before.current.spec.port, {"hang": True}))
    record = bench.until(preparing)
    bench.orphaned(record)
    wait_until(lambda: not processes.alive(record.preparation.process), "its end")
    assert bench.adopt() == ["one"]
    after = bench.until(lambda record: record.adopted)
    assert after.preparation.step is PreparationStep.CANCELED
    assert after.server == before.server


def test_prepared_process_with_changed_files_is_replaced(bench, prepared):
    before = bench.ready(bench.spec())
    late = {"late": {"step": "unprepared", "message": "its files were replaced"}}
    bench.restart(prepared(before.current.spec.port, IMPORTED, ACCEPTED, late))
    after = bench.wait(State.READY, generation=2)
    assert after.preparation.step is PreparationStep.UNPREPARED
    assert after.preparation.message == "its files were replaced"
    assert after.attempt == 0
    assert "the old one died" not in bench.file("keeper.log").read_text()


def test_prepared_process_killed_before_handover_is_replaced(bench, prepared, tmp_path):
    before = bench.ready(bench.spec("--ignore", "TERM"))
    bench.restart(prepared(before.current.spec.port, IMPORTED, ACCEPTED))
    record = bench.until(lambda record: record.state is State.STOPPING and preparing(record))
    processes.send(record.preparation.process, signal.SIGKILL)
    after = bench.wait(State.READY, generation=2)
    assert after.preparation.step is PreparationStep.UNPREPARED
    assert "ended" in after.preparation.message


def test_next_restart_clears_earlier_preparation_error(bench, prepared):
    """Otherwise a running restart would look like a rejected one."""
    before = bench.ready(bench.spec())
    refused = {"say": {"step": "refused", "message": "no"}}
    bench.restart(prepared(before.current.spec.port, refused, {"exit": 2}))
    bench.until(lambda record: record.preparation and record.preparation.step is PreparationStep.REFUSED)
    plain = bench.spec(port=before.current.spec.port)
    assert bench.restart(plain).preparation is None
    bench.wait(State.READY, generation=2)
    bench.restart(prepared(before.current.spec.port, refused, {"exit": 2}))
    bench.until(lambda record: record.preparation and record.preparation.step is PreparationStep.REFUSED)
    bench.stopped()
    bench.restart(plain)
    assert bench.wait(State.READY, generation=3).preparation is None


def test_restart_without_secret_keeps_current_preparation(bench, prepared, monkeypatch):
    monkeypatch.delenv("SOME_TOKEN", raising=False)
    before = bench.ready(bench.spec())
    bench.restart(prepared(before.current.spec.port, {"hang": True}))
    process = bench.until(preparing).preparation.process
    with pytest.raises(errors.SecretMissingError):
        bench.restart(bench.spec(port=before.current.spec.port, secret_names=("SOME_TOKEN",)))
    assert bench.read().preparation.process == process
    assert processes.alive(process)


def test_accepted_restart_continues_after_keeper_death(bench, prepared):
    before = bench.ready(bench.spec("--ignore", "TERM"))
    bench.restart(prepared(before.current.spec.port, IMPORTED, ACCEPTED))
    record = bench.until(lambda record: record.state is State.STOPPING and preparing(record))
    bench.orphaned(record)
    assert bench.adopt() == ["one"]
    after = bench.wait(State.READY, generation=2)
    assert after.preparation.step is PreparationStep.UNPREPARED


def test_restart_continues_if_keeper_dies_before_handover_is_noticed(bench, prepared, tmp_path, wait_until):
    """Until the process reports that it is the server, the kernel kills it with its keeper."""
    before = bench.ready(bench.spec())
    busy = {"wait": str(tmp_path / "never")}
    bench.restart(prepared(before.current.spec.port, IMPORTED, ACCEPTED, busy))
    record = bench.until(lambda record: record.state is State.STARTING and record.server and not record.preparation)
    bench.orphaned(record)
    wait_until(lambda: not processes.alive(record.server), "its end")
    assert bench.adopt() == ["one"]
    after = bench.wait(State.READY, generation=2)
    assert not after.start_pending
    assert after.server != record.server


def test_stop_before_handover_is_noticed(bench, prepared, tmp_path):
    before = bench.ready(bench.spec())
    busy = {"wait": str(tmp_path / "never")}
    bench.restart(prepared(before.current.spec.port, IMPORTED, ACCEPTED, busy))
    record = bench.until(lambda record: record.state is State.STARTING and record.server and not record.preparation)
    after = bench.stopped()
    assert after.current.number == 2
    assert not after.start_pending
    assert not processes.alive(record.server)


def test_exit_after_handover_is_not_a_pending_start(bench, prepared):
    """The process became the server and then failed: only the restart policy may start it again."""
    before = bench.ready(bench.spec())
    options = ("--never-ready", "--exit-after", "0", "--exit-code", "7")
    bench.restart(prepared(before.current.spec.port, IMPORTED, ACCEPTED, options=options))
    after = bench.until(lambda record: record.state is State.FAILED)
    assert after.current.exit.code == 7
    assert after.current.number == 2
    assert not after.start_pending


def test_printed_secrets_are_masked(bench, prepared, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "correct-horse-battery")
    before = bench.ready(bench.spec(secret_names=("VLLM_API_KEY",)))
    refused = {"say": {"step": "refused", "message": "bad key $VLLM_API_KEY"}}
    spec = prepared(
        before.current.spec.port,
        {"print": "key $VLLM_API_KEY, HF token hf_" + "a1B2" * 8},
        refused,
        {"exit": 2},
        secret_names=("VLLM_API_KEY",),
    )
    bench.restart(spec)
    after = bench.until(lambda record: record.preparation and not record.preparation.step.under_way)
    shown = after.preparation.message + after.preparation.output
    assert "bad key" in shown
    assert "HF token" in shown
    assert "correct-horse" not in shown
    assert "a1B2" not in shown
    home = folders.server_folder(bench.root, "one")
    for path in home.iterdir():
        if path.is_file():
            assert b"correct-horse" not in path.read_bytes(), path


def test_preparation_times_out(bench, prepared):
    tuning = {**TUNING, "prepare": 0.5}
    client.launch(bench.root, "one", bench.spec(), tuning=tuning)
    before = bench.wait(State.READY)
    bench.restart(prepared(before.current.spec.port, {"hang": True}))
    after = bench.until(lambda record: record.preparation and record.preparation.step is PreparationStep.FAILED)
    assert "0.5s" in after.preparation.message
    assert after.server == before.server


def test_preparation_with_too_much_output_is_ended(bench, prepared):
    before = bench.ready(bench.spec())
    bench.restart(prepared(before.current.spec.port, *[{"print": "x" * 60_000}] * 2, {"flood": 9 << 20}))
    after = bench.until(lambda record: record.preparation and record.preparation.step is PreparationStep.FAILED)
    assert "printed too much" in after.preparation.message
    assert after.server == before.server


# -- rollback ---------------------------------------------------------------------------------------------------------


def test_generation_failing_before_ready_is_rolled_back(bench):
    first = bench.spec()
    before = bench.ready(first)
    failing = bench.spec("--never-ready", "--exit-after", "0.1", "--exit-code", "7", port=first.port, rollback=True)
    bench.restart(failing)
    after = bench.wait(State.READY, generation=3)
    assert after.current.spec.argv == first.argv
    back = after.current.rollback
    assert (back.failed, back.to) == (2, 1)
    assert "code 7" in back.reason
    assert after.generations[1].exit.code == 7
    assert after.generations[1].ready_at is None
    assert after.downtime_seconds > 0
    assert not processes.alive(before.server)


def test_generation_fails_without_rollback(bench):
    first = bench.spec()
    bench.ready(first)
    bench.restart(bench.spec("--never-ready", "--exit-after", "0.1", "--exit-code", "7", port=first.port))
    assert len(bench.wait(State.FAILED).generations) == 2


def test_unstartable_program_is_rolled_back(bench):
    first = bench.spec()
    bench.ready(first)
    missing = replace(first, argv=("/no/such/vllm", "serve"), rollback=True)
    bench.restart(missing)
    after = bench.wait(State.READY, generation=3)
    assert after.current.rollback.failed == 2
    assert "/no/such/vllm" in after.current.rollback.reason


def test_failed_rollback_is_final_and_reports_attempts(bench, tmp_path):
    once = tmp_path / "served"
    first = bench.spec("--fail-once", str(once))
    once.touch()
    bench.ready(first)
    once.unlink()  # from now on it fails again
    failing = bench.spec("--never-ready", "--exit-after", "0.1", "--exit-code", "7", port=first.port, rollback=True)
    bench.restart(failing)
    after = bench.wait(State.FAILED)
    assert len(after.generations) == 3
    assert "run 2: exited with code 7; after reverting to run 1's flags: exited with code 5" in after.reason


def test_server_failed_before_restart_is_not_rolled_back(bench):
    first = bench.spec("--exit-after", "0.5")
    bench.launch(first)
    bench.wait(State.FAILED)
    bench.restart(bench.spec("--never-ready", "--exit-after", "0.1", port=first.port, rollback=True))
    assert len(bench.until(lambda record: record.state is State.FAILED and record.current.number == 2).generations) == 2


def test_stop_while_next_generation_starts(bench):
    first = bench.spec()
    bench.ready(first)
    bench.restart(bench.spec("--never-ready", port=first.port, rollback=True))
    bench.until(lambda record: record.state is State.STARTING and record.current.number == 2 and record.server)
    assert len(bench.stopped().generations) == 2


def test_preparation_step_is_reported_while_server_serves(bench, prepared):
    before = bench.ready(bench.spec())
    reading = {"say": {"step": "reading", "message": "the weights are read ahead, 3.20 of 15.00 GiB"}}
    bench.restart(prepared(before.current.spec.port, IMPORTED, reading, {"hang": True}))
    seen = bench.until(lambda record: record.preparation and record.preparation.message)
    assert seen.preparation.message == "the weights are read ahead, 3.20 of 15.00 GiB"
    assert (seen.preparation.step, seen.state) == (PreparationStep.CHECKING, State.READY)
