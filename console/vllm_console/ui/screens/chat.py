"""The chat screen: streams answers with their latencies, below the state of the server and its KV cache."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from rich.cells import cell_len
from rich.style import Style
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.chat.answer import Answer, PartKind, figures_text
from vllm_console.chat.code import Language, code_for
from vllm_console.chat.conversation import ChatOptions, Turn, request_for
from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.window import combine
from vllm_console.text import count, duration, percent, plain, printed
from vllm_console.ui.actions import bindings, scoped
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.servers import starting_text
from vllm_console.ui.screens.dialogs import choose
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.terminal.lines import LineView, line
from vllm_console.ui.terminal.screens import TerminalScreen
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, STRONG, WARN
from vllm_console.ui.widgets.draw import (
    Part,
    bar,
    fit,
    fit_words,
    keys_line,
    paragraph,
    parts_length,
    side_by_side,
    wrap,
)
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.frame_box import FrameBox
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader
from vllm_launchers.keeper.records import State
from vllm_launchers.plan.flags import served_name
from vllm_launchers.secrets import API_KEY
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp
    from vllm_console.ui.parts.chat import Chat

REDRAW_SECONDS = 0.1
REST = 4.0
"""How many times as long as a redraw took to wait for the next one: a long answer, wrapped again each time, would
otherwise delay keys."""
IDLE_REDRAWS = 10
"""While no answer is running, redraw only every n-th tick: the KV cache is sampled once a second."""

LINE_BREAK = "⏎"
"""Represents a line break in the input line."""

BAR_CELLS = 10
NAME_CELLS = 20
LEAST_MODEL = 12
"""Minimum width to which a model's name may be cut; a shorter one would be unreadable."""
READY = (State.READY, State.UNRESPONSIVE)

_OPTIONS = {
    "system prompt": "how the model should answer",
    "temperature": "0 to 2, 0 is greedy; empty: the model's own",
    "max tokens": "per answer; empty: the server's limit",
    "stop": "stop sequences, separated by |; \\n: line end",
    "raw text": "continue the text without a chat template, as for a base model",
}


class PromptLine(Entry):
    """The input line; keeps pasted line breaks as `LINE_BREAK`."""

    def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        self.insert_text_at_cursor(as_line(event.text))


class ChatScreen(TerminalScreen[None]):
    """Shows a chat. The chat outlives the screen until the console exits, and a running answer continues."""

    AUTO_FOCUS = ""
    SCOPE = "chat"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("chat", [action.id for action in scoped("chat")])]
    DEFAULT_CSS = """
    ChatScreen { background: ansi_default; }
    ChatScreen #chat-keys { height: 1; }
    ChatScreen #chat-status, ChatScreen #chat-lines { height: auto; }
    ChatScreen VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; background: ansi_default; }
    ChatScreen #chat-entry { height: 1; border: none; padding: 0 1; background: ansi_default; }
    """

    def __init__(self, console: ConsoleApp, chat: Chat) -> None:
        super().__init__()
        self._main, self._chat = console, chat
        self._status = LineView(id="chat-status")
        self._lines, self._keys = LineView(id="chat-lines"), LineView(id="chat-keys")
        self._scroll = VerticalScroll(self._lines, can_focus=False)
        self._box = FrameBox(self._status, self._scroll)
        self._entry = PromptLine(id="chat-entry")
        self._follows = True
        """Whether to keep scrolling to the end as it grows."""
        self._ticks = 0
        self._was_running = False
        self._redraw_at = 0.0
        """The earliest next redraw of a running answer (monotonic seconds)."""
        self._drawn: list[tuple[Turn | None, Turn | None, int, list[Strip]]] = []
        """Cache of each turn's lines; valid while the turn and the width stay the same."""

    def compose(self) -> ComposeResult:
        """Yield the box with servers and conversation, the input line and the keys."""
        yield self._box
        yield self._entry
        yield self._keys

    def on_mount(self) -> None:
        """Restore the draft and start following the answers."""
        self._type(self._chat.draft)
        self.set_interval(REDRAW_SECONDS, self._tick)
        self._redraw()

    def on_resize(self) -> None:
        """Draw for the new size."""
        if self.is_mounted:
            self._redraw()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        chat = self._chat
        server = self._main.server(chat.name)
        if chat.waiting and (server is None or not waits(server)):
            self._send(chat.waiting)
        self._ticks += 1
        running = chat.running
        if self._was_running and not running:
            self._offer_again()
        began = time.monotonic()
        due = began >= self._redraw_at if running else self._was_running or self._ticks % IDLE_REDRAWS == 0
        if due:
            self._redraw()
            ended = time.monotonic()
            self._redraw_at = ended + REST * (ended - began)
        self._was_running = running

    def _offer_again(self) -> None:
        """Put a prompt that got no answer back into the input line."""
        turns = self._chat.sessions[self._chat.name].turns
        if turns and not turns[-1].answer.parts and self._entry.purpose == "prompt" and not self._entry.value:
            self._entry.put(as_line(turns[-1].prompt))

    def _redraw(self) -> None:
        width = self._box.inner_width
        chat = self._chat
        self._box.show_title(f"Chat · {' and '.join(map(plain, chat.sessions))}", _set(chat.options, width))
        now = self._main.snapshot.at if self._main.snapshot is not None else 0.0
        servers = [(name, self._main.server(name)) for name in chat.sessions]
        lines = [status_line(name, server, now, width) for name, server in servers]
        lines += [row for _, server in servers if server is not None for row in measured_lines(server, width)]
        self._status.show(lines)
        lines = self._turn_lines(width - 2)
        self._lines.show([*self._made_up(width - 2), *(lines or _first_lines(width))])
        if self._follows:
            self.call_after_refresh(self._scroll.scroll_end, animate=False)
        hints = [(key_of(one.id), one.short, f"screen.{one.call}") for one in scoped("chat") if one.short]
        self._keys.show([keys_line(hints, self.app.size.width)])

    def _made_up(self, width: int) -> list[Strip]:
        servers = [self._main.server(name) for name in self._chat.sessions]
        names = [plain(server.name) for server in servers if server is not None and server.simulated]
        if not names:
            return []
        what = "is simulated: the text of its" if len(names) == 1 else "are simulated: the text of their"
        return paragraph(f"{' and '.join(names)} {what} answers is made up.", width, WARN)

    def _turn_lines(self, width: int) -> list[Strip]:
        chat = self._chat
        first, *others = [session.turns for session in chat.sessions.values()]
        now = time.time()
        waits_for = [waiting_text(self._main.server(name), chat.sent_at, now) for name in chat.sessions]
        drawn: list[tuple[Turn | None, Turn | None, int, list[Strip]]] = []
        for at, turn in enumerate(first):
            second = others[0][at - chat.offset] if others and 0 <= at - chat.offset < len(others[0]) else None
            known = self._drawn[at] if at < len(self._drawn) else None
            if known is None or known[0] is not turn or known[1] is not second or known[2] != width:
                known = (turn, second, width, turn_lines(turn, second, width, waits_for))
            drawn.append(known)
        self._drawn = drawn
        lines = [strip for *_, strips in drawn for strip in strips]
        if chat.waiting:
            lines += [*_said(chat.waiting, width), line((f" Sent as soon as {plain(chat.name)} is ready.", WARN))]
        return lines

    def action_scroll(self, by: int) -> None:
        """Scroll by lines."""
        self._scroll.scroll_relative(y=by, animate=False)
        self.call_after_refresh(self._scrolled)

    def action_page(self, by: int) -> None:
        """Scroll by pages."""
        self.action_scroll(by * max(1, self._scroll.size.height - 1))

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self) -> None:
        """Follow the end if it is now visible."""
        self.call_after_refresh(self._scrolled)

    def _scrolled(self) -> None:
        self._follows = self._scroll.scroll_offset.y >= self._scroll.max_scroll_y

    # -- typing ----------------------------------------------------------------------------------------------------

    def _type(self, text: str = "") -> None:
        self._entry.open("prompt", as_line(text), placeholder="type a prompt")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Save the draft."""
        if self._entry.purpose == "prompt":
            self._chat.draft = as_text(event.value)

    def action_chat_break(self) -> None:
        """Insert a line break."""
        self._entry.insert_text_at_cursor(LINE_BREAK)

    def action_chat_send(self) -> None:
        """Send the prompt, or set the option being edited."""
        chat, text = self._chat, self._entry.value
        if self._entry.purpose != "prompt":
            self._take(str(self._entry.purpose), as_text(text).strip())
            return
        if not text.strip():
            return
        if chat.running or chat.waiting:
            self._main.say(f"An answer is being generated: {key_of('chat_back')} stops it.", WARN)
            return
        server = self._main.server(chat.name)
        if server is not None and waits(server):
            chat.waiting = as_text(text)
        else:
            self._send(as_text(text))
        self._entry.put("")
        self._follows = True
        self._redraw()

    def _send(self, prompt: str) -> None:
        self._was_running = True  # an answer may end before the next tick
        self._chat.send(prompt)

    def action_chat_back(self) -> None:
        """Cancel editing an option, or else stop the answer, or else leave."""
        if self._entry.purpose != "prompt":
            self._type(self._chat.draft)
        elif self._chat.running or self._chat.waiting:
            self._stop()
        else:
            self.close_with()

    def action_chat_stop(self) -> None:
        """Stop the answer; without one, show which key leaves the chat."""
        if self._chat.running or self._chat.waiting:
            self._stop()
        else:
            self._main.say_on_top(f"{key_of('chat_back')} leaves the chat.")

    def _stop(self) -> None:
        self._chat.stop()
        if not self._entry.value:
            self._type(self._chat.draft)
        self._redraw()

    def action_chat_new(self) -> None:
        """Start a new conversation."""
        self._chat.clear()
        self._redraw()

    # -- options ---------------------------------------------------------------------------------------------------

    def action_chat_options(self) -> None:
        """Choose an option to change."""
        shown = _values(self._chat.options)
        choices = [(name, f"{shown[name]} · {about}" if shown[name] else about) for name, about in _OPTIONS.items()]
        choose(self._main, "Chat options", choices, self._edit)

    def _edit(self, name: str) -> None:
        options = self._chat.options
        if name == "raw text":
            self._chat.options = replace(options, raw=not options.raw)
            self._redraw()
        else:
            self._entry.open(name, as_line(_values(options)[name]), placeholder=f"{name}: {_OPTIONS[name]}")

    def _take(self, name: str, text: str) -> None:
        try:
            self._chat.options = with_option(self._chat.options, name, text)
        except ValueError as error:
            self._main.say(str(error), WARN)
            return
        self._type(self._chat.draft)
        self._redraw()

    # -- other servers, code, copy ---------------------------------------------------------------------------------

    def action_chat_other(self) -> None:
        """Choose a second server, or remove it."""
        if self._chat.remove_second():
            self._redraw()
            return
        snapshot = self._main.snapshot
        others = [
            one
            for one in (snapshot.servers if snapshot is not None else ())
            if one.ours and one.state in READY and one.name != self._chat.name
        ]
        if not others:
            self._main.say("No other server of yours is ready.", WARN)
            return

        def add(name: str) -> None:
            self._chat.add(name)
            self._redraw()

        choices = [(one.name, plain(one.model)) for one in others]
        choose(self._main, "Also send to which server?", choices, add)

    def action_chat_code(self) -> None:
        """Show a request as code, with the draft as its prompt, or else the last prompt."""
        chat, server = self._chat, self._main.server(self._chat.name)
        session = chat.sessions[chat.name]
        turns = list(session.turns)
        prompt = chat.draft or (turns.pop().prompt if turns else "Hello")
        turns = [turn for turn in turns if not turn.answer.running]
        if server is None:
            self._main.say(f"{plain(chat.name)} is gone.", WARN)
            return
        target = session.target
        model = target.model if target is not None else served_name(server.flags, server.model)
        raw = chat.options.raw or bool(turns and turns[-1].answer.raw)
        context = target.max_model_len if target is not None else None
        request = request_for(model, turns, prompt, chat.options, raw=raw, context=context)
        variable = API_KEY if os.environ.get(API_KEY) else ""
        codes = {one: code_for(server.url, request, one, variable=variable) for one in Language}
        self._main.push_screen(CodeScreen(self._main, codes))

    def action_chat_copy(self) -> None:
        """Copy the last answer, without terminal control sequences."""
        turns = self._chat.sessions[self._chat.name].turns
        text = printed(turns[-1].answer.text()) if turns else ""
        if text.strip():
            copy(self.app, text, "The last answer", self._main.say_on_top)
        else:
            self._main.say("There is no answer to copy.", WARN)


class CodeScreen(ReaderScreen):
    """Shows a request as code, one language at a time."""

    SCOPE = "code"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("code")]

    def __init__(self, console: ConsoleApp, codes: dict[Language, str]) -> None:
        hints = [(key_of(one.id), one.short, f"screen.{one.call}") for one in scoped("code")]
        super().__init__(TextReader(lambda: f"The same request: {self._language}", self._code_lines, lambda: hints))
        self._main, self._codes = console, codes
        self._language = next(iter(codes))

    def _code_lines(self, width: int) -> list[Strip]:
        rows = [row for text in self._codes[self._language].split("\n") for row in _wrapped(text, width - 1)]
        return [line(), *(line(f" {row}") for row in rows)]

    def action_next_language(self) -> None:
        """Switch to the next language."""
        languages = list(self._codes)
        self._language = languages[(languages.index(self._language) + 1) % len(languages)]
        self._reader.redraw()

    def action_copy_code(self) -> None:
        """Copy the code."""
        copy(self.app, self._codes[self._language], f"The code ({self._language})", self._main.say_on_top)


# -- text -------------------------------------------------------------------------------------------------------------


def as_line(text: str) -> str:
    """Encode a text for the input line."""
    return printed(text.replace("\r\n", "\n").replace("\r", "\n")).replace("\t", "    ").replace("\n", LINE_BREAK)


def as_text(value: str) -> str:
    """Decode the value of the input line."""
    return value.replace(LINE_BREAK, "\n")


def with_option(options: ChatOptions, name: str, text: str) -> ChatOptions:
    """Return the options with one of them set to a typed value.

    Raises:
        ValueError: the value is invalid; the text is a sentence.
    """
    if name == "system prompt":
        return replace(options, system=text)
    if name == "temperature":
        if not text:
            return replace(options, temperature=None)
        if not re.fullmatch(r"\d*\.?\d+|\d+\.", text) or float(text) > 2:
            raise ValueError("temperature must be a number from 0 to 2.")
        return replace(options, temperature=float(text))
    if name == "max tokens":
        if text and not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 9):
            raise ValueError("max tokens must be a whole number.")
        return replace(options, max_tokens=int(text) if text else None)
    stops = tuple(one.strip(" ").replace("\\n", "\n") for one in text.split("|"))
    return replace(options, stop=tuple(one for one in stops if one))


def _values(options: ChatOptions) -> dict[str, str]:
    """The options as the user would type them."""
    return {
        "system prompt": options.system,
        "temperature": f"{options.temperature:g}" if options.temperature is not None else "",
        "max tokens": str(options.max_tokens or ""),
        "stop": " | ".join(one.replace("\n", "\\n") for one in options.stop),
        "raw text": "on" if options.raw else "",
    }


# -- lines ------------------------------------------------------------------------------------------------------------


def waits(server: ServerView) -> bool:
    """Whether a server is becoming ready, so that prompts should wait."""
    return server.state.alive and server.state not in READY and server.state is not State.STOPPING


def measured_lines(server: ServerView, width: int) -> list[Strip]:
    """Warning that a tuner or load test is measuring the server, which requests from here would distort."""
    if server.tuner is None and server.load_test is None:
        return []
    who = "tuner" if server.tuner is not None else "load test"
    return paragraph(f"A {who} measures {server.name}: your requests will distort its results.", width, WARN)


def status_line(name: str, server: ServerView | None, now: float, width: int) -> Strip:
    """A server's state, KV cache usage and requests. If space is short, the model's name is cut or left out."""
    if server is None:
        return line((f" {plain(name)}", STRONG), "  ", ("is gone", BAD))
    parts: list[Part] = [(f" {fit(server.marked_name, NAME_CELLS).rstrip()}", STRONG), "  "]
    if server.state not in READY:
        starts = server.state is State.STARTING
        parts += [(str(server.state), ACCENT if starts else WARN), "  "]
        text = starting_text(server, now, width) if starts else plain(server.reason)
        return line(*parts, fit_words(text, width - parts_length(parts)))
    if server.sample is not None:
        seen = combine(server.sample.engines.values())
        running, waiting, usage = count(seen.requests_running), count(seen.requests_waiting), seen.kv_cache_usage
        figures: list[list[Part]] = [
            [("KV cache ", DIM), bar(usage, BAR_CELLS), f" {percent(usage)}"],
            [("   running ", DIM), running],
            [("   waiting ", DIM), waiting],
        ]
        for figure in figures:
            parts += figure if parts_length(parts) + parts_length(figure) < width else []
    room = width - parts_length(parts) - 4
    model = plain(server.model)
    if cell_len(model) > room:
        model = fit(model.rstrip("/").rpartition("/")[2], room).rstrip() if room >= LEAST_MODEL else ""
    return line(*parts, (f"   {model}", DIM)).crop(0, width)


def _set(options: ChatOptions, width: int) -> list[Part]:
    found = [f"{name} {value}" for name, value in _values(options).items() if value and name != "system prompt"]
    found += ["system prompt"] if options.system else []
    text = plain(" · ".join(found))
    return [(text, DIM)] if text and cell_len(text) < width // 2 else []


def _first_lines(width: int) -> list[Strip]:
    sends, options, other = (key_of(f"chat_{name}") for name in ("send", "options", "other"))
    paragraphs = (
        f"Type a prompt below, then {sends}. The answer is streamed here, with TTFT, ITL and tokens/s.",
        f"{options} sets the system prompt, temperature and more; {other} sends each prompt to a second server, too.",
        "The conversation is never written to a file.",
    )
    return [row for text in paragraphs for row in (line(), *paragraph(text, width - 2, DIM))]


def waiting_text(server: ServerView | None, sent_at: float, now: float) -> str:
    """How long a request has waited for its first token, and the maximum number of requests ahead of it, if known.

    vLLM reports how many requests wait, but not in which order. This one is assumed to be among them.
    """
    waited = now - sent_at
    text = f"waiting {duration(waited)} for the first token" if waited >= 1 else "…"
    if server is None or server.sample is None or server.sample.at <= sent_at:
        return text  # the sample is older than the request
    ahead = (combine(server.sample.engines.values()).requests_waiting or 0.0) - 1
    if ahead < 1:
        return text
    return f"waiting {duration(waited)}: at most {counted(round(ahead), 'request')} ahead in the server's queue"


def turn_lines(turn: Turn, second: Turn | None, width: int, waiting: Sequence[str] = ()) -> list[Strip]:
    """A turn: the prompt and its answer, or two answers side by side.

    ``waiting`` is the text shown per server until its first token.
    """
    one, other, *_ = (*waiting, "", "")
    if second is None:
        return [*_said(turn.prompt, width), *answer_lines(turn.answer, width, one), line()]
    column = (width - 1) // 2
    blocks = [answer_lines(turn.answer, column, one), answer_lines(second.answer, column, other)]
    return [*_said(turn.prompt, width), *side_by_side(blocks, column, max(map(len, blocks))), line()]


def _said(prompt: str, width: int) -> list[Strip]:
    rows = [row for text in printed(prompt).split("\n") for row in _wrapped(text, width - 3)]
    return [line((" ▸ " if not at else "   ", KEY), (row, STRONG)) for at, row in enumerate(rows)]


_STYLES: dict[PartKind, tuple[str, Style | None]] = {
    PartKind.REASONING: ("reasoning", DIM),
    PartKind.CONTENT: ("", None),
    PartKind.TOOL_CALL: ("tool call", ACCENT),
}


def answer_lines(answer: Answer, width: int, waiting: str = "") -> list[Strip]:
    """An answer: note, parts, problem and figures. ``waiting`` is shown until its first part arrives."""
    lines = [line((f" {row}", DIM)) for row in _wrapped(plain(answer.note), width - 2) if answer.note]
    for part in answer.parts:
        title, style = _STYLES[part.kind]
        if title:
            lines.append(line((f" {title} {plain(part.name)}".rstrip(), KEY if part.name else DIM)))
        indent = "   " if title else " "
        rows = [row for text in printed(part.text).split("\n") for row in _wrapped(text, width - len(indent) - 1)]
        lines += [line((f"{indent}{row}", style)) for row in rows]
    if answer.problem:
        lines += [line((f" {row}", BAD)) for row in _wrapped(plain(answer.problem), width - 2)]
        if answer.parts:
            lines.append(line((" The conversation is kept.", DIM)))
    elif answer.stopped and not answer.parts:
        lines.append(line((" Stopped before its first token.", WARN)))
    elif answer.running and not answer.parts:
        lines += [line((f" {row}", DIM)) for row in _wrapped(waiting or "…", width - 2)]
    if text := figures_text(answer):
        lines += [line((f" {row}", DIM)) for row in _wrapped(text, width - 2)]
    return lines


def _wrapped(text: str, width: int) -> Sequence[str]:
    """Wrap a line to ``width`` cells, keeping its indentation."""
    return wrap(text.expandtabs(4), max(8, width)) or ("",)
