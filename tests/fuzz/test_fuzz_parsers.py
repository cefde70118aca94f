"""Any content of a file, log or response gives a value or a one-sentence error, never another error.

``VLLMCONSOLE_FUZZ_LONG=5000`` tries that many of each, different ones each time; ``tests/fuzz/guided.py`` runs for
hours.
"""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.readers import BYTES, READERS, TEXTS, try_

MOST = int(os.environ.get("VLLMCONSOLE_FUZZ_LONG") or 0)

NUMBERS = (
    st.integers() | st.floats() | st.sampled_from([0, -1, 2**63, 2**64, 10**400, 1e308, float("nan"), True, False])
)


def written(keys: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    """JSON with keys that the reader knows and arbitrary values."""
    names = st.sampled_from(keys or ("a",)) | st.sampled_from(TEXTS)
    some = st.recursive(
        st.none() | NUMBERS | st.text(max_size=12) | names,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
        max_leaves=12,
    )
    return st.dictionaries(names, some, max_size=6).map(lambda found: json.dumps(found).encode())


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    """Valid bytes with some changed, removed or inserted, as by a disk fault."""
    put = st.binary(max_size=4) | st.sampled_from(
        [*(text.encode(errors="surrogatepass") for text in TEXTS), b"9" * 5000, b"9" * 400, b"1e999"]
    )
    change = st.tuples(st.integers(0, len(good)), st.integers(0, 12), put)

    def applied(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = good
        for at, length, new in changes:
            data = data[:at] + new + data[at + length :]
        return data

    return st.lists(change, min_size=1, max_size=4).map(applied)


@pytest.mark.parametrize("name", READERS)
def test_known_odd_inputs(name: str) -> None:
    reader = READERS[name]
    reader.read(reader.good) if name != "history row" else None
    for data in (*BYTES, *(text.encode(errors="surrogatepass") for text in TEXTS), reader.good * 300):
        try_(reader, data)


@pytest.mark.parametrize("name", READERS)
def test_any_input(name: str) -> None:
    reader = READERS[name]

    @settings(
        max_examples=MOST or 60,
        deadline=None,
        derandomize=not MOST,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(reader.good) | written(reader.keys) | st.binary(max_size=300))
    def run(data: bytes) -> None:
        try_(reader, data)

    run()
