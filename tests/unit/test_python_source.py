from __future__ import annotations

import gc
import threading
import time

import pytest

from vllm_launchers.python_source import parse_expression, parse_literal, parse_module

EXPRESSION = "f(" * 20 + "x" + ")" * 20


@pytest.fixture
def thread_switches():
    """The garbage collector runs often, and switches to another thread each time."""

    def switch(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    threshold = gc.get_threshold()
    gc.callbacks.append(switch)
    gc.set_threshold(10)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(switch)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_module, f"a = {EXPRESSION}\n" * 20),
        (parse_expression, EXPRESSION),
        (parse_literal, "[" * 20 + "1" + "]" * 20),
    ],
    ids=["module", "expression", "literal"],
)
def test_threads_may_parse_at_the_same_time(thread_switches, parse, text) -> None:
    failures: list[SystemError] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        try:
            for _ in range(20):
                parse(text)
        except SystemError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("parse", [parse_module, parse_expression, parse_literal])
@pytest.mark.parametrize("text", ["(", "a b", "\0"])
def test_text_that_is_not_python(parse, text) -> None:
    with pytest.raises((SyntaxError, ValueError)):
        parse(text)
