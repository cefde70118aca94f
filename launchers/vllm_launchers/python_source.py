"""Python source as a syntax tree, from any thread.

CPython (3.11 and 3.12 at least) counts the depth of a tree under construction in one place for all threads. If the
thread switches in the meantime, it raises ``SystemError: AST constructor recursion depth mismatch`` (CPython issue
106905). One lock prevents that.
"""

from __future__ import annotations

import ast
import threading

_lock = threading.Lock()


def parse_module(text: str) -> list[ast.stmt]:
    """The statements of a module's source.

    Raises:
        SyntaxError, ValueError, RecursionError: it is not Python that this interpreter can parse.
    """
    with _lock:
        return ast.parse(text).body


def parse_expression(text: str) -> ast.expr:
    """One expression.

    Raises:
        SyntaxError, ValueError, RecursionError: it is not Python that this interpreter can parse.
    """
    with _lock:
        return ast.parse(text, mode="eval").body


def parse_literal(text: str) -> object:
    """The value of a literal, such as a dictionary as ``repr`` writes it.

    Raises:
        ValueError, SyntaxError, MemoryError, RecursionError: it is not a literal.
    """
    with _lock:
        return ast.literal_eval(text)
