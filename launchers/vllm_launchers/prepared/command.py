"""Derives the command that prepares a server from the one that starts it normally."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_launchers.python_source import parse_module
from vllm_launchers.vllm.engines import MODULE
from vllm_launchers.vllm.installed_packages import script_interpreter, which

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")

SIMULATED = ("-m", "vllm_launchers.simulated")

_HEAD_BYTES = 8192
_COMMAND_LINE = MODULE[1]
_HELPERS = {"re", "sys"}
_CALLS = {"main", "re.sub", "sys.argv[0].endswith", "sys.exit"}


def prepared_command(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What to run instead of ``argv``: ``…/vllm serve …``, ``PYTHON -m vllm.entrypoints.cli.main serve …`` or the
    simulated engine's command.

    Empty if the interpreter is unknown or the command does more than run vLLM: wrappers, containers, other modules.
    ``environ`` is the server's; its ``PATH`` applies to ``#!/usr/bin/env python3``.
    """
    environ = os.environ if environ is None else environ
    if tuple(argv[1:4]) == (*MODULE, "serve"):
        python = _found(argv[0], environ)
        return (str(python), str(BOOTSTRAP), _COMMAND_LINE, *argv[3:]) if python else ()
    if tuple(argv[1:3]) == SIMULATED:
        return (argv[0], "-m", f"{SIMULATED[1]}.prepared", *argv[3:])
    if tuple(argv[1:2]) != ("serve",):
        return ()
    script = _found(argv[0], environ)
    interpreter = _interpreter(script, environ) if script else None
    return (*interpreter, str(BOOTSTRAP), str(script), *argv[1:]) if interpreter else ()


def _found(word: str, environ: Mapping[str, str]) -> Path | None:
    """An executable by path or name. Keeps links, because an environment's Python is a link to one outside."""
    path = Path(word) if "/" in word else which(word, environ)
    return path.absolute() if path and path.is_file() and os.access(path, os.X_OK) else None


def _interpreter(script: Path, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The interpreter of vLLM's own command with its options; None for any other script."""
    try:
        with script.open("rb") as file:
            head = file.read(_HEAD_BYTES + 1)
        text = head.decode()
    except (OSError, UnicodeDecodeError):
        return None
    python = script_interpreter(script, text, environ)
    if len(head) > _HEAD_BYTES or python is None or not _only_runs_vllm(text):
        return None
    found = _found(str(python), environ)
    if found is None:
        return None
    first, _, options = text[2:].partition("\n")[0].strip().partition(" ")
    if Path(first).name == "env":
        return (str(found),) if not options.strip().startswith("-") else None
    return (str(found), options.strip()) if options and found == Path(first) else (str(found),)


def _only_runs_vllm(text: str) -> bool:
    """Whether a Python script does only what an installer writes for a command.

    A script that sets variables or patches vLLM first must be run itself.
    """
    try:
        body = parse_module(text)
    except (SyntaxError, ValueError):
        return False
    imported = False
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            imported = True
            if statement.module != _COMMAND_LINE or [name.name for name in statement.names] != ["main"]:
                return False
        elif not _is_usual(statement):
            return False
    return imported


def _is_usual(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        return all(name.name in _HELPERS for name in statement.names)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True  # the line that makes a shell start Python
    for node in ast.walk(statement):
        if isinstance(node, ast.ImportFrom | ast.Import | ast.AugAssign | ast.Delete):
            return False
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in _CALLS:
            return False
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] != ["sys.argv[0]"]:
            return False
    return isinstance(statement, ast.If | ast.Expr)
