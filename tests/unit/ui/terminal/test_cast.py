"""Terminal recordings."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_console.ui.terminal.cast import Cast


def test_recording_is_an_asciicast(tmp_path: Path) -> None:
    cast = Cast(tmp_path / "a.cast", 80, 24, "a title")
    cast.output("\x1b[1mé⣿\r\n")
    cast.resize(80, 24)
    cast.resize(100, 30)
    cast.close()
    cast.output("too late")
    head, *events = map(json.loads, (tmp_path / "a.cast").read_text().splitlines())
    assert (head["version"], head["width"], head["height"], head["title"]) == (2, 80, 24, "a title")
    assert [event[1:] for event in events] == [["o", "\x1b[1mé⣿\r\n"], ["r", "100x30"]]
    assert 0 <= events[0][0] <= events[1][0]
    assert not cast.trouble


def test_full_disk_ends_only_the_recording() -> None:
    cast = Cast(Path("/dev/full"), 80, 24, "")
    cast.output("x" * 100_000)
    cast.output("more")
    cast.close()
    assert "incomplete: No space left on device" in cast.trouble
