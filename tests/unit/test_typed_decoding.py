"""Decoding into types from several threads at once."""

from __future__ import annotations

import subprocess
import sys

RACE = """
import sys, threading
import msgspec
from vllm_launchers.typed_decoding import convert, decode_json

sys.setswitchinterval(1e-6)
for number in range(150):
    inner = msgspec.defstruct("Inner", [(f"i{at}", int | str | None, None) for at in range(20)])
    fields = [(f"o{at}", inner | None, None) for at in range(20)]
    outer = msgspec.defstruct("Outer", [("all", list[inner], []), *fields])
    gate = threading.Barrier(4)
    done = []

    def work(at, outer=outer, gate=gate, done=done):
        gate.wait()
        plain = {"all": [{"i1": 1}], "o1": {"i2": "x"}}
        made = convert(plain, outer) if at % 2 else decode_json(msgspec.json.encode(plain), outer)
        done.append(made.all[0].i1 == 1 and made.o1.i2 == "x")

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert done == [True] * 4
"""


def test_concurrent_first_use_of_a_type_does_not_crash() -> None:
    """With msgspec's own functions this ends with SIGSEGV, as once in a console during a concurrent plan and
    restart."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
