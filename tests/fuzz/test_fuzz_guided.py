"""The guided search as a test: a number of seeded inputs for each parser, if atheris is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDED = Path(__file__).with_name("guided.py")
RUNS = 1500
SEED = 20261121

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed (pip install 'vllm-console[fuzz]')"
)


@pytest.mark.parametrize("reader", ["metrics page", "topology", "keeper's record", "host document"])
def test_guided_runs_find_nothing(reader: str, tmp_path: Path) -> None:
    words = [sys.executable, str(GUIDED), reader, "--runs", str(RUNS), "--seed", str(SEED), "--folder", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r": (\d+) tried, 0 found", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= RUNS
    assert not list((tmp_path / "findings").iterdir())
