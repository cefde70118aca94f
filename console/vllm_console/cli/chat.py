"""``vllm-console chat NAME``: chat with a server, on screen or in a pipe."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from vllm_console.cli.console import open_on
from vllm_console.cli.load_target import find_target, warn_of_tuner
from vllm_console.cli.options import add_json, count_from, number_type
from vllm_console.cli.output import Document, complain, print_json
from vllm_console.text import plain, printed
from vllm_launchers.errors import NotFoundError, OperationError, RefusedError, UsageError

if TYPE_CHECKING:
    from vllm_console.chat.answer import Answer, AnswerReader
    from vllm_console.chat.client import ChatClient, ChatServer
    from vllm_console.chat.conversation import ChatOptions
    from vllm_console.fleet.local import LocalFleet

LARGEST_PROMPT = 16 << 20
"""Maximum bytes of standard input, more than any context holds."""

LANGUAGES = ("curl", "python", "javascript")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Chat with a server. In a terminal it opens the console's chat. Otherwise it reads the prompt from standard "
        "input and streams the answer to standard output, reasoning and figures to standard error."
    )
    parser.add_argument("server", metavar="name", help="a server's name, or a URL such as http://127.0.0.1:8000")
    parser.add_argument("--also", metavar="NAME", help="send the same prompt to a second server (A/B)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--temperature",
        type=number_type(0, 2, "a number from 0 to 2"),
        metavar="T",
        help="0 to 2 (default: the model's)",
    )
    parser.add_argument("--max-tokens", type=count_from, metavar="N", help="maximum tokens of the answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT")
    parser.add_argument(
        "--raw", action="store_true",
        help="continue the text without a chat template (automatic for a model that has none)",
    )  # fmt: skip
    parser.add_argument("--tools", type=Path, metavar="FILE", help="JSON list of tools that the model may call")
    parser.add_argument(
        "--code", choices=LANGUAGES, help="print the request as code, with the key taken from VLLM_API_KEY"
    )
    parser.add_argument(
        "--remote", action="store_true", help="allow another machine; in a pipe also another user's server"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Open the chat, or answer standard input; exit code 1 if an answer is missing or incomplete."""
    if args.code and args.json:
        raise UsageError("--code prints code, and can't be combined with --json")
    options = _options(args)
    in_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    named = "://" not in args.server
    if named and in_terminal and not (args.json or args.code or args.also):
        return open_on(args, partial(_check, args.server, remote_allowed=args.remote), chat=options)
    servers = [_server(args, args.server), *([_server(args, args.also)] if args.also else [])]
    prompt = _prompt(in_terminal)
    import asyncio

    if args.code:
        print(asyncio.run(_code(servers[0], prompt, options, args.code)))
        return 0
    printer = _Printer() if not args.json and len(servers) == 1 else None
    answered = asyncio.run(_ask(servers, prompt, options, partial(printer.show, end=False) if printer else None))
    answers = [answer for _, answer in answered]
    if not any(answer.parts for answer in answers) and (problem := answers[0].problem):
        raise OperationError(problem)
    if args.json:
        documents = [_document(client, answer) for client, answer in answered]
        print_json(documents[0] | ({"also": documents[1]} if len(documents) > 1 else {}))
    else:
        for client, answer in answered:
            if printer is None:
                print(f"── {plain(client.server.name)}")
            (printer or _Printer()).finish(answer)
    for answer in answers:
        if answer.problem:
            complain(answer.problem)
    return 1 if any(answer.problem for answer in answers) else 0


def _check(name: str, fleet: LocalFleet, *, remote_allowed: bool) -> None:
    """Raise NotFoundError or RefusedError for a server that cannot be chatted with on screen."""
    server = fleet.snapshot().server(name)
    if server is None:
        raise NotFoundError(f"no server is called '{plain(name)}'; see 'vllm-console list', or give a URL")
    if server.attached is not None:
        if not remote_allowed:
            raise RefusedError(f"{plain(name)} is attached from {server.url}: nothing is sent to it without --remote")
    elif server.headless:
        raise RefusedError(f"{plain(name)} is {server.node}: it serves no requests; node 0 does")
    elif not server.ours:
        raise RefusedError(f"{plain(name)} {server.foreign}")


def _options(args: argparse.Namespace) -> ChatOptions:
    """The chat options from the command line. Raises UsageError if the tools file is invalid."""
    from vllm_console.chat.conversation import ChatOptions

    tools: Any = []
    if args.tools is not None:
        try:
            tools = json.loads(args.tools.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--tools {args.tools} can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--tools {args.tools} is not JSON: {error}") from error
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UsageError(f"--tools {args.tools}: expected a list of objects, as the API takes them")
    return ChatOptions(args.system, args.temperature, args.max_tokens, tuple(args.stop), args.raw, tuple(tools))


def _server(args: argparse.Namespace, word: str) -> ChatServer:
    """The server with this name or URL.

    Raises:
        OperationError: it does not exist, is not ready, or belongs to another user.
    """
    from vllm_console.chat.client import ChatServer
    from vllm_console.load.client import check_url, lookup_of, own_access

    chosen = argparse.Namespace(**{**vars(args), "server": word, "preset": None})
    target = find_target(chosen, "--remote", others_allowed=args.remote, remote_allowed=args.remote)
    warn_of_tuner(target, "this prompt")
    url = check_url(target.url, allow_remote=args.remote)
    lookup = target.lookup or (None if args.remote else lookup_of(url))
    return ChatServer(word, url, target.access or own_access(), lookup)


def _prompt(in_terminal: bool) -> str:
    """The text on standard input.

    Raises:
        UsageError: standard input is closed, or the prompt is empty, too long or not UTF-8.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed: echo 'Hello' | vllm-console chat NAME")
    if in_terminal:
        complain("type the prompt; end it with ctrl-d on an empty line")
    data = sys.stdin.buffer.read(LARGEST_PROMPT + 1)
    if len(data) > LARGEST_PROMPT:
        raise UsageError("the prompt on standard input is longer than 16 MiB")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on standard input is not UTF-8") from error
    text = text.removesuffix("\n")
    if not text.strip():
        raise UsageError("no prompt on standard input: echo 'Hello' | vllm-console chat NAME")
    return text


async def _ask(
    servers: list[ChatServer], prompt: str, options: ChatOptions, show: Any | None
) -> list[tuple[ChatClient, Answer]]:
    """Each server's answer; ``show`` receives partial answers."""
    import asyncio

    from vllm_console.chat.client import ChatClient

    def changed(reader: AnswerReader) -> None:
        if show is not None:
            show(reader.answer())

    clients = [ChatClient(server) for server in servers]
    answers = await asyncio.gather(*(client.ask((), prompt, options, changed) for client in clients))
    return list(zip(clients, answers, strict=True))


async def _code(server: ChatServer, prompt: str, options: ChatOptions, language: str) -> str:
    """Code that sends the same request. Raises OperationError if the server does not report its model."""
    from vllm_console.chat.code import Language, code_for
    from vllm_console.chat.conversation import request_for
    from vllm_console.load.client import find_served_model as served
    from vllm_console.load.client import open_client

    async with open_client(server.url, server.access, server.lookup) as client:
        target = await served(client, server.model, server.access)
    request = request_for(target.model, (), prompt, options, raw=options.raw, context=target.max_model_len)
    return code_for(
        server.url, request, Language(language), variable=server.access.variable if server.access.key else ""
    )


class _Printer:
    """Prints an answer as it streams: content to standard output, reasoning to standard error.

    A line with an escape code is only printed once it is complete, because a part does not show where the code ends.
    """

    def __init__(self) -> None:
        self._part = -1
        self._printed = ""

    def show(self, answer: Answer, *, end: bool) -> None:
        """Print what is new; ``end`` means nothing follows."""
        from vllm_console.chat.answer import PartKind

        for index in range(max(0, self._part), len(answer.parts)):
            part, last = answer.parts[index], index == len(answer.parts) - 1
            stream = sys.stderr if part.kind is PartKind.REASONING else sys.stdout
            if index > self._part:
                if self._part >= 0:
                    print(file=sys.stderr if answer.parts[self._part].kind is PartKind.REASONING else sys.stdout)
                self._part, self._printed = index, ""
                if part.kind is not PartKind.CONTENT:
                    print(_title(part.kind, part.name), end="", file=stream)
            text = printed(part.text if end or not last else _whole(part.text))
            if text.startswith(self._printed):
                print(text[len(self._printed) :], end="", file=stream, flush=True)
                self._printed = text

    def finish(self, answer: Answer) -> None:
        """Print the rest of the answer, and its figures."""
        from vllm_console.chat.answer import figures_text

        self.show(answer, end=True)
        print(flush=True)
        if answer.note:
            print(plain(answer.note), file=sys.stderr)
        if text := figures_text(answer):
            print(text, file=sys.stderr)


def _title(kind: str, name: str) -> str:
    return f"tool call {plain(name)} " if kind == "tool_call" else "reasoning: "


def _whole(text: str) -> str:
    """The text without a last line that contains the start of an escape code."""
    head, newline, last = text.rpartition("\n")
    return head + newline if any(one == "\x1b" or "\x80" <= one <= "\x9f" for one in last) else text


def _document(client: ChatClient, answer: Answer) -> Document:
    from vllm_console.chat.answer import PartKind

    calls = [part for part in answer.parts if part.kind is PartKind.TOOL_CALL]
    target = client.target
    return {
        "server": client.server.name,
        "url": client.server.url,
        "model": target.model if target is not None else None,
        "raw": answer.raw,
        "answer": answer.text(),
        "reasoning": answer.text(PartKind.REASONING) or None,
        "tool_calls": [{"name": call.name, "arguments": call.text} for call in calls],
        "finish_reason": answer.finish_reason or None,
        "figures": to_builtins(answer.figures),
        "problem": answer.problem or None,
    }
