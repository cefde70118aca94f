"""Parses Python source into syntax trees, from any thread.

CPython (at least 3.11 and 3.12) counts the depth of a tree under construction in one place for all threads. If the
thread switches meanwhile, it raises ``SystemError: AST constructor recursion depth mismatch`` (CPython issue 106905).
A lock prevents that.
"""

from __future__ import annotations

import ast
import threading

_lock = threading.Lock()


def parse_module(text: str) -> list[ast.stmt]:
    """The statements of a module's source.

    Raises:
        SyntaxError, ValueError, RecursionError: this interpreter can't parse it.
    """
    with _lock:
        return ast.parse(text).body


def parse_expression(text: str) -> ast.expr:
    """A single expression.

    Raises:
        SyntaxError, ValueError, RecursionError: this interpreter can't parse it.
    """
    with _lock:
        return ast.parse(text, mode="eval").body


def parse_literal(text: str) -> object:
    """The value of a literal, such as the ``repr`` of a dictionary.

    Raises:
        ValueError, SyntaxError, MemoryError, RecursionError: it is not a literal.
    """
    with _lock:
        return ast.literal_eval(text)
