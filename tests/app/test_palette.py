"""The command line: objects and arguments, what it lists, refuses and remembers."""

from __future__ import annotations

import json
import threading

import pytest
from msgspec.structs import replace
from textual.events import Paste

from vllm_console.ui.commands import Kind, match
from vllm_console.ui.parts.recent_commands import MOST_KEPT, RecentCommands
from vllm_console.ui.screens.palette import PaletteScreen


async def opened(c, text=""):
    """Open the command line with this text, once presets are known."""
    await c.press("colon")
    await c.until(lambda: isinstance(c.app.screen, PaletteScreen))
    await c.until(lambda: c.app.screen._commands._on_servers is None or c.app.screen._commands._on_servers.presets)
    if text:  # pasted except for the last letter, since each key ranks all commands and draws the screen
        c.app.screen._entry.post_message(Paste(text[:-1]))
        await c.press("space" if text[-1] == " " else text[-1])
        await c.until(lambda: c.app.screen._entry.value == text, "what was typed")


async def run(c, text):
    await opened(c, text)
    await c.press("enter")


def listed(c):
    """The commands listed so far."""
    return [command.text for command in c.app.screen._found]


async def test_go_selects_a_server_and_drops_a_filter_that_hides_it(console):
    async with console() as c:
        c.app.operations.filter_by("chat")
        await run(c, "go coder")
        await c.until(lambda: c.app.operations.selected_name == "coder")
        await c.lacks("matching")


async def test_letters_in_the_middle_of_words_are_no_match(console):
    async with console() as c:
        await opened(c, "xprt")
        assert listed(c) == [], "export"
        assert (c.app.screen._entry.value, c.app.screen._at) == ("xprt", None)
        await c.press("escape")
        await opened(c, "exprt")
        assert listed(c)[0].startswith("export ")


async def test_beginnings_of_the_first_words_come_before_a_word_in_the_middle(console):
    async with console() as c:
        await opened(c, "lb")
        assert listed(c)[0] == "launch batch"
        await c.press("enter")
        await c.sees("▸ batch")


@pytest.mark.parametrize(
    ("typed", "text", "kind"),
    [
        ("lb", "launch batch", Kind.WORDS),
        ("lau ba", "launch batch", Kind.WORDS),
        ("mns", "max-num-seqs", Kind.WORDS),
        ("lb", "set data-parallel-hybrid-lb=", Kind.WORD),
        ("ns", "max-num-seqs", Kind.LETTERS),
        ("launch", "launch batch", Kind.PREFIX),
    ],
)
def test_how_what_is_typed_matches(typed, text, kind):
    assert match(typed, text).kind is kind


async def test_launch_opens_the_launch_screen_at_the_preset(console):
    async with console() as c:
        await run(c, "launch batch")
        await c.sees("Launch")
        await c.sees("▸ batch")


async def test_set_stages_a_flag_of_the_selected_server(console):
    async with console() as c:
        await opened(c, "set max-num-seqs=64")
        await c.sees("Stage --max-num-seqs 256 → 64 on chat")
        await c.press("enter")
        await c.sees("staged  --max-num-seqs 256 → 64")
        await run(c, "unset max-num-seqs")
        await c.sees("--max-num-seqs 256 → unset")
        await run(c, "revert")
        await c.sees("Staged a revert")
        assert c.app.operations.staging.of("chat")["max-num-seqs"] == 512


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("set max-num-seqs=many", "--max-num-seqs takes a whole number, not 'many'."),
        ("set max-num-seqs=", "--max-num-seqs needs a value"),
        ("set max-num-seqs=256", "chat already has --max-num-seqs 256."),
        ("unset block-size", "chat does not set --block-size."),
        ("unset max-num-sqes", "chat does not set --max-num-sqes; did you mean --max-num-seqs?"),
        ("go nobody", "No server is called 'nobody'; choose from chat, coder"),
        ("restart max-num-seqs=77", "restart takes a server and no flags: select it, then 'set max-num-seqs=77'"),
        ("restart chat --block-size=16", "select it, then 'set block-size=16', then 'restart'."),
        ("update coder max-num-seqs=77", "update takes a server and no flags"),
        ("range 7h", "No range is called '7h'; choose from 5m, 15m, 1h, 6h"),
        ("theme pink", "No theme is called 'pink'; choose from terminal, dark"),
        ("layout round", "No layout is called 'round'"),
        ("launch nothing", "No preset is called 'nothing'"),
        ("columns +colour", "No column is called 'colour'"),
        ("columns +-hit", "No column is called '-hit'"),
        ("columns hit ++kv", "No column is called '+kv'"),
        ("copy soul", "No thing to copy is called 'soul'"),
        ("xyzzy", "No command matches 'xyzzy'."),
    ],
)
async def test_what_does_not_apply_says_why_and_stays_to_be_corrected(console, typed, sentence):
    async with console() as c:
        await run(c, typed)
        await c.sees(sentence)
        assert isinstance(c.app.screen, PaletteScreen)
        assert c.app.operations.staging.by_server == {}
        assert not c.app.recent.texts


async def test_servers_are_sorted_only_by_what_tells_them_apart(console, fakes):
    async with console(lambda now: replace(fakes.chat(now), gpus=())) as c:
        await opened(c, "sort ")
        assert "sort kv" in listed(c)
        assert {"sort gpu", "sort owner", "sort host"}.isdisjoint(listed(c))
        await c.press("escape")
        await run(c, "sort gpu")
        await c.sees("No column is called 'gpu'; choose from name, model")
    async with console(fakes.chat) as c:
        await run(c, "sort gpu")
        await c.until(lambda: c.app.operations._order.title == "GPU")


async def test_another_persons_server_is_not_changed(console, fakes):
    async with console(fakes.observed) as c:
        await run(c, "set max-num-seqs=64")
        await c.sees("outside this console: read-only.")
        await c.press("escape")
        await run(c, "stop")
        await c.sees("outside this console: read-only.")


async def test_without_a_server_there_is_nothing_to_act_on(console, fakes):
    async with console(fleet=fakes.FakeFleet()) as c:
        await run(c, "copy url")
        await c.sees("No server selected: n launches one.")


async def test_read_only_lists_nothing_that_changes_something_and_reports_it(console, tmp_path):
    async with console(read_only=True, state=tmp_path) as c:
        await opened(c)
        assert not {"restart", "stop", "set ", "launch"} & set(listed(c))
        assert "go " in listed(c)
        assert c.app.screen._entry.placeholder == "range 6h, layout focus, theme dark, …"
        await c.press(*"set", "space", *"a=1")
        await c.sees("set changes something, and this console is read-only.")
        await c.press("escape")
        await run(c, "go coder")
        await c.until(lambda: c.app.recent.texts == ["go coder"])
        assert not list(tmp_path.iterdir())


async def test_view_commands_change_the_view(console):
    async with console() as c:
        await run(c, "layout focus")
        await c.sees("L focus")
        await run(c, "pane log")
        await c.sees("L back")
        await run(c, "range 6h")
        await c.sees("6h ·")
        await run(c, "columns name state ttft gpu")
        await c.until(lambda: "KV CACHE" not in c.text)
        await c.sees("NAME      STATE         TTFT p99 GPU")
        await run(c, "columns +hit -ttft")
        await c.sees("NAME      STATE         GPU  ")
        assert c.app.operations.columns == ("name", "state", "gpu", "hit")
        await run(c, "columns default")
        await c.sees("KV CACHE")
        await run(c, "filter anna")
        await c.sees("Servers matching 'anna' · 1 of 7")


async def test_copy_url(console, monkeypatch):
    monkeypatch.delenv("TMUX", raising=False)
    async with console() as c:
        await run(c, "copy url")
        await c.sees("URL of chat copied to the terminal's clipboard")
        assert c.app.clipboard == "http://127.0.0.1:8000"


async def test_export_writes_a_file_once(console, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with console() as c:
        await run(c, "export shell")
        await c.sees("chat written to")
        text = (tmp_path / "chat.sh").read_text()
        assert "serve" in text
        await run(c, "export shell")
        await c.sees("already exists: move it first.")
        assert (tmp_path / "chat.sh").read_text() == text


async def test_a_proxy_gets_the_selected_server_first_and_the_marked_ones(console, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with console() as c:
        await run(c, "mark coder")
        await run(c, "go chat")
        await run(c, "export nginx")
        await c.sees("chat written to")
        text = (tmp_path / "chat.nginx.conf").read_text()
        assert ";  # chat\n" in text
        assert "backup;  # coder" in text


async def test_letters_find_a_command_and_what_is_not_whole_is_completed(console):
    async with console() as c:
        await opened(c, "gocod")
        assert listed(c)[0] == "go coder"
        await c.press("ctrl+u", *"rng6")
        assert listed(c)[0] == "range 6h"
        await c.press("ctrl+u", *"set", "space", *"numseqs", "enter")
        await c.sees(": set max-num-seqs=")
        await c.press(*"32", "enter")
        await c.sees("staged  --max-num-seqs 256 → 32")


@pytest.mark.parametrize("typed", ["foo", "quti"])
async def test_scattered_letters_of_an_argument_are_no_match(console, typed):
    async with console() as c:
        await run(c, typed)
        await c.sees(f"No command matches '{typed}'.")
        await c.press("enter")
        assert c.app.operations.staging.by_server == {}


async def test_why_a_command_does_not_apply_is_shown_in_full(console):
    async with console(size=(80, 24)) as c:
        await opened(c, "at 99:99")
        await c.sees("expected an earlier time")
        list_rows = c.text.partition("Commands")[2].splitlines()[1:-1]
        assert " ".join(" ".join(list_rows).split()).endswith("such as '2026-11-22 03:10' or 03:10."), c.text


async def test_enter_sets_no_flag_that_was_not_chosen(console):
    async with console() as c:
        await opened(c, "max-num-seqs")
        assert listed(c)[0].startswith(("set ", "unset "))
        await c.press("enter")
        await c.sees("Choose a command with ↓ first.")
        assert c.app.screen._entry.value == "max-num-seqs"
        assert c.app.operations.staging.by_server == {}
        await c.press("ctrl+u", *"unset", "space", *"max-num-s")
        await c.sees("▸ unset max-num-seqs")


async def test_tab_completes_and_an_arrow_chooses(console):
    async with console() as c:
        await opened(c, "la fo")
        await c.press("tab")
        await c.sees(": layout focus")
        await c.press("ctrl+u", *"layout", "space", "down", "down", "enter")
        await c.sees("L focus")


async def test_enter_alone_does_nothing(console):
    async with console() as c:
        await run(c, "stop")
        await c.sees("Stop chat?")
        await c.press("n")
        await opened(c)
        assert listed(c)[0] == "stop", "what was used last comes first"
        await c.press("enter")
        await c.until(lambda: c.app.screen is c.app.operations)
        assert c.fleet.calls == []


async def test_keys_do_not_wait_until_a_command_is_written(console, monkeypatch):
    asked, written = threading.Event(), threading.Event()

    def hang(_):
        asked.set()
        assert written.wait(20)

    monkeypatch.setattr(RecentCommands, "write", hang)
    async with console() as c:
        await run(c, "layout wide")
        await c.until(asked.is_set)
        await c.press("j")
        assert c.app.operations.selected_name != "chat"
        assert not written.is_set()
        written.set()


async def test_what_was_used_last_comes_first_and_is_remembered(console, tmp_path):
    async with console(state=tmp_path) as c:
        await run(c, "theme terminal")
        await run(c, "layout wide")
        await c.sees("L wide")
        await run(c, "set max-num-seqs=64")
        await c.until((tmp_path / "commands.json").exists)
        await c.until(lambda: len(json.loads((tmp_path / "commands.json").read_text())) == 3)
    assert (tmp_path / "commands.json").stat().st_mode & 0o777 == 0o600
    async with console(state=tmp_path) as c:
        await opened(c)
        await c.until(lambda: listed(c)[:3] == ["set max-num-seqs=64", "layout wide", "theme terminal"])
        await c.press(*"t")
        assert listed(c).index("theme terminal") < listed(c).index("theme dark")


def test_what_is_remembered_is_bounded_and_holds_no_secret(tmp_path):
    recent = RecentCommands(tmp_path)
    for number in range(MOST_KEPT + 20):
        recent.add(f"set max-num-seqs={number}")
    recent.add("set api-key=sk-verysecretvalue0123456789")
    recent.add("go " + "x" * 500)
    recent.write()
    kept = json.loads((tmp_path / "commands.json").read_text())
    assert len(kept) == MOST_KEPT
    assert kept[0] == f"set max-num-seqs={MOST_KEPT + 19}"
    (tmp_path / "commands.json").write_text('["go \\u001b[2J", 3')
    again = RecentCommands(tmp_path)
    again.read()
    assert again.texts == []


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40), (200, 60)])
async def test_the_palette_covers_neither_the_table_nor_the_finding(console, fakes, size):
    async with console(fakes.pressed, fakes.coder, size=size) as c:
        await opened(c, "fix")
        top = c.app.screen.query_one("#palette").region.y
        for id in ("#servers", "#finding"):
            assert c.app.operations.query_one(id).region.bottom <= top
        assert c.app.screen.query_one("#palette").region.bottom == size[1]


async def test_on_what_is_read_only_what_holds_everywhere(console):
    async with console() as c:
        for key in ("d", "i", "question_mark"):
            await c.press(key)
            await c.until(lambda: c.app.screen is not c.app.operations)
            await opened(c)
            assert "restart" not in listed(c), key
            assert {"quit", "theme "} <= set(listed(c))
            assert c.app.screen._entry.placeholder == "theme dark, …"
            await c.press(*"go", "space", *"chat")
            await c.sees("go works on the main screen; leave this one first.")
            await c.press("escape", "escape")
            await c.until(lambda: c.app.screen is c.app.operations)


async def test_none_over_a_question(console):
    async with console() as c:
        await c.press("s")
        await c.sees("Stop chat?")
        await c.press("ctrl+p")
        await c.press("n")
        await c.until(lambda: c.app.screen is c.app.operations, "the question was answered, not a palette")


async def test_a_server_that_is_named_is_acted_on_alone(console, fakes):
    def second(at):
        return replace(fakes.stopped(at), name="other")

    async with console(fakes.stopped, second) as c:
        await c.press("asterisk")
        await run(c, "restart other")
        await c.until(lambda: c.fleet.calls)
        assert [call[:2] for call in c.fleet.calls] == [("restart", "other")]


async def test_at_shows_an_earlier_moment_and_end_is_live_again(console, fakes):
    async with console() as c:
        await c.until(lambda: c.app.operations.selected is not None and c.app.operations.selected.series is not None)
        await opened(c, "at 12:38")
        await c.sees("Show 12:38:00, 3m07s ago")
        await c.press("enter")
        await c.sees("at 12:38:00 · 3m07s ago")
        await c.until(lambda: c.fleet.times[-1].at == fakes.NOW - 187)
        await run(c, "at end")
        await c.until(lambda: c.app.operations.time.view.at is None)
        await run(c, "at 2025-12-31 23:00:05")
        await c.until(lambda: c.fleet.times[-1].at == fakes.NOW - 49_262)
        await opened(c, "at noon")
        await c.sees("'noon': expected an earlier time such as '2026-11-22 03:10' or 03:10.")
