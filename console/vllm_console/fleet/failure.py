"""Diagnoses a failed start of a server, or a restart that was refused or rolled back, from its log lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Diagnosis
from vllm_console.fleet.snapshot import PreparedRestart
from vllm_console.fleet.types import flag_difference
from vllm_console.logs.file import last_lines
from vllm_console.text import plain, redrawn
from vllm_launchers.keeper.records import Preparation, PreparationStep, ServerRecord
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.procfs import resident_mib
from vllm_launchers.secrets import redact
from vllm_launchers.vllm.flags.changes import change_text

if TYPE_CHECKING:
    from vllm_launchers.plan.engine_verdict import EngineVerdict


def diagnosed(lines: Sequence[str], code: int | None, details: Details) -> Diagnosis:
    """Diagnose a failed start with these details from its last lines and its exit code."""
    from vllm_console.diagnosis.failure.diagnose import diagnose

    shown = [redact(redrawn(line)) for line in lines]
    return diagnose(shown, code, details.flags, details.gpu_name, mla=details.mla, environment=details.variables)


def verdict_with_fix(verdict: EngineVerdict, details: Details) -> EngineVerdict:
    """The verdict on a launch with these details, with the change that the message of a refusal suggests, if any."""
    from vllm_launchers.plan.engine_verdict import EngineAnswer

    if verdict.answer is not EngineAnswer.REFUSED:
        return verdict
    fixes = diagnosed(verdict.message.splitlines(), None, details).fixes
    return replace(verdict, fix=next((one.changes for one in fixes if not one.changes.empty), None))


def diagnosed_part(
    log: Path, code: int | None, details: Details, inode: int | None, begin: int, end: int | None = None
) -> Diagnosis | None:
    """Diagnose the generation that wrote this part of a log; includes the line's number in the log.

    None if it wrote nothing and was not killed.
    """
    before, lines = last_lines(log, inode, begin, end)
    if not lines and (code is None or code >= 0):
        return None
    found = diagnosed(lines, code, details)
    return replace(found, line=found.line + before) if found.line is not None else found


# -- the last restart: being prepared, refused by vLLM, or rolled back ------------------------------------------------


class LastRestart:
    """The last restart of one server; ``log`` is the server's log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._refused: tuple[float, Diagnosis] | None = None
        """When the refused restart was requested, and its diagnosis."""
        self._rolled_back: tuple[int, str] | None = None
        """The number of the generation that replaced a failed one, and the reason."""

    def view(self, preparation: Preparation, details: Details) -> PreparedRestart:
        """The restart being prepared, or the outcome of the last one that did not happen as requested.

        ``details`` are those of the current generation.
        """
        process = preparation.process
        return PreparedRestart(
            asked_at=preparation.asked_at,
            step=preparation.step,
            since=preparation.step_at,
            changes=_changes(details, unpack(preparation.spec.details)),
            message=redact(plain(preparation.message)),
            memory_mib=resident_mib(process.pid) if process is not None else None,
            diagnosis=self._refusal(preparation),
        )

    def _refusal(self, preparation: Preparation) -> Diagnosis | None:
        """Why vLLM refused the flags, computed once; None if it did not."""
        if preparation.step is not PreparationStep.REFUSED:
            return None
        if self._refused is None or self._refused[0] != preparation.asked_at:
            lines = f"{preparation.output}\n{preparation.message}".splitlines()
            self._refused = (preparation.asked_at, diagnosed(lines, None, unpack(preparation.spec.details)))
        return self._refused[1]

    def rolled_back(self, record: ServerRecord) -> str:
        """Why it runs the flags of an earlier generation, with the relevant log line; empty if it does not."""
        back = record.current.rollback
        if back is None:
            return ""
        if self._rolled_back is None or self._rolled_back[0] != record.current.number:
            failed = next((one for one in record.generations if one.number == back.failed), None)
            why, found = redact(plain(back.reason)), None
            if failed is not None:
                code = failed.exit.status if failed.exit is not None else None
                wanted, part = unpack(failed.spec.details), (back.log_inode, back.log_offset, back.log_end)
                found = diagnosed_part(self._log, code, wanted, *part)
            if found is not None:
                why = "; ".join(filter(None, (found.explanation.removesuffix("."), plain(found.evidence), why)))
            text = f"run {back.failed} failed, back to run {back.to}'s flags: {why}"
            self._rolled_back = (record.current.number, text)
        return self._rolled_back[1]


def _changes(before: Details, after: Details) -> tuple[str, ...]:
    """The changes of a restart as text: the preset, or flags."""
    if before.preset != after.preset:
        return (f"preset {before.preset} → {after.preset}",)
    edits = flag_difference(before.flags, after.flags).edits
    return tuple(plain(change_text(flag, before.flags.get(flag), value)) for flag, value in edits.items())
