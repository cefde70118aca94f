"""Shares between processes the work that a first collection does for each file: pytest rewrites assertions of the tests
(two thirds of the time), and Hypothesis collects constants of the product (a quarter).

Otherwise each process would do this for all files. Here each process does its share first, and reads the rest from the
caches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion import rewrite
from hypothesis.internal.constants_ast import constants_from_module

PRODUCT = ("console", "launchers")


def prepare_own_part(config: pytest.Config) -> None:
    """Do this process's share of what isn't cached yet: the requested test files and the product's modules."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    for file in list(_asked_for(config))[number :: worker["workercount"]]:
        _rewrite(file, config)
    modules = sorted(file for part in PRODUCT for file in (config.rootpath / part).rglob("*.py"))
    for file in modules[number :: worker["workercount"]]:
        module = ModuleType(file.stem)
        module.__file__ = str(file)
        constants_from_module(module)


def _asked_for(config: pytest.Config) -> Iterator[Path]:
    for word in dict.fromkeys(word.partition("::")[0] for word in config.args):
        path = config.invocation_params.dir / word
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else (path,)


def _rewrite(file: Path, config: pytest.Config) -> None:
    """Like `AssertionRewritingHook.exec_module` before it runs the file, which also reports any error."""
    state = config.stash[rewrite.assertstate_key]
    folder = rewrite.get_cache_dir(file)
    cached = folder / (file.stem + rewrite.PYC_TAIL)
    try:
        if rewrite._read_pyc(file, cached, state.trace) is None and rewrite.try_makedirs(folder):
            stat, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, stat, cached)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
