"""The console after an unexpected error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.terminal

BROKEN = """
import sys
from vllm_console.cli.main import main
from vllm_console.ui.screens.operations import OperationsScreen

def broken(self):
    token = "hf_%(secret)s"
    raise LookupError("the drawing went wrong with " + token)

OperationsScreen.action_describe = broken
sys.exit(main([]))
"""
SECRET = "Zq8" * 12


def test_crash_restores_terminal_and_writes_report(terminal_module, command, home):
    command("start", "batch", "--engine", "simulated", "--wait")
    console = terminal_module.Terminal([sys.executable, "-c", BROKEN % {"secret": SECRET}], 120, 40, home)
    try:
        console.wait_for("batch")
        console.press("d")
        assert console.wait_end() == 1
        assert console.restored()
        said = console.text
    finally:
        console.close()
    assert "internal error" in said
    assert "Traceback" not in said
    reports = list((Path(home["XDG_STATE_HOME"]) / "vllm-console" / "crashes").iterdir())
    assert len(reports) == 1
    text = reports[0].read_text()
    assert "the drawing went wrong" in text
    assert SECRET not in text + said
    assert json.loads(command("status", "batch", "--json").stdout)["state"] == "ready"
