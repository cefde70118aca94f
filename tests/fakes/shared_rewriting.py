"""pytest rewrites the asserts of each test file before it imports it: two thirds of a first collection.

With several processes, each would rewrite all files. Here each rewrites its part first, and reads the rest from the
cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_own_part(config: pytest.Config) -> None:
    """Rewrite this process's share of the requested test files that are not cached yet."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    for file in list(_asked_for(config))[number :: worker["workercount"]]:
        _rewrite(file, config)


def _asked_for(config: pytest.Config) -> Iterator[Path]:
    for word in dict.fromkeys(word.partition("::")[0] for word in config.args):
        path = config.invocation_params.dir / word
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else (path,)


def _rewrite(file: Path, config: pytest.Config) -> None:
    """What `AssertionRewritingHook.exec_module` does before it runs the file. One with an error is reported by that."""
    state = config.stash[rewrite.assertstate_key]
    folder = rewrite.get_cache_dir(file)
    cached = folder / (file.stem + rewrite.PYC_TAIL)
    try:
        if rewrite._read_pyc(file, cached, state.trace) is None and rewrite.try_makedirs(folder):
            stat, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, stat, cached)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
