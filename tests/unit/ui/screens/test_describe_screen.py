"""The description of a server: tables with a heading each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.ui.screens.describe import describe_lines


def shown(server, now, width=118):
    return [strip.text.rstrip() for strip in describe_lines(server, now, width)]


def test_flags_are_in_columns_with_the_whole_reason(fakes):
    lines = shown(fakes.chat(fakes.NOW), fakes.NOW, 78)
    start = lines.index(" Flags")
    columns = [lines[start + 1].index(title) for title in ("FLAG", "VALUE", "WHY")]
    row = next(text for text in lines[start + 2 :] if "--max-num-seqs" in text)
    assert row[columns[0] :].startswith("--max-num-seqs")
    assert row[columns[1] :].startswith("256")
    assert lines[start - 1] == "", "room between the tables"
    reason = fakes.REASONS["max-model-len"]
    assert reason in " ".join(" ".join(text[columns[2] :] for text in lines[start:]).split())


def test_changes_are_side_by_side(fakes):
    server = fakes.chat(fakes.NOW)
    lines = shown(replace(server, previous_flags={**server.flags, "max-num-seqs": 64, "gone": "x" * 90}), fakes.NOW)
    start = lines.index(" Changed since the previous run")
    assert lines[start + 1].split() == ["FLAG", "BEFORE", "NOW"]
    assert [text.split()[:1] + text.split()[-1:] for text in lines[start + 2 : start + 4]] == [
        ["--gone", "unset"],
        ["--max-num-seqs", "256"],
    ]
    same = shown(replace(server, previous_flags=server.flags), fakes.NOW)
    assert same[same.index(" Changed since the previous run") + 1] == " nothing"


@pytest.mark.parametrize("width", [60, 78, 118, 198])
@pytest.mark.parametrize("maker", ["chat", "broken", "docs", "observed"])
def test_screen_keeps_its_width(fakes, maker, width):
    lines = describe_lines(getattr(fakes, maker)(fakes.NOW), fakes.NOW, width)
    tables = [strip for strip in lines if not strip.text.startswith("  ")]
    assert all(strip.cell_length <= width for strip in tables)


def test_address_of_a_remote_server_names_its_machine(fakes):
    chat = fakes.chat(fakes.NOW)
    elsewhere = replace(chat, name="h100/chat", ours=False, remote="h100", remote_ours=True)
    assert f"{chat.url} on h100" in "\n".join(shown(elsewhere, fakes.NOW))
    assert "on h100" not in "\n".join(shown(chat, fakes.NOW))
    assert elsewhere.url == chat.url


def test_own_remote_server_is_not_called_foreign(fakes):
    text = " ".join("\n".join(shown(fakes.there(fakes.NOW), fakes.NOW)).split())
    assert "owner you (it runs on box; it can only be stopped and restarted from here)" in text
