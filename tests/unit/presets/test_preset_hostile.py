"""Any file content gives a preset or a one-sentence error."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.presets.load import Problem, check_document, read_presets, to_preset
from vllm_launchers.presets.model import Preset

SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.dates(),
    st.sampled_from(["chatbot", "4k", "auto", "\x1b[31m"]),
)
KEYS = st.sampled_from(
    [
        "extends",
        "drop",
        "title",
        "summary",
        "model",
        "flags",
        "environment",
        "workload",
        "objectives",
        "value",
        "why",
        "max-num-seqs",
        "gpu-memory-utilization",
        "max-model-len",
        "api-key",
        "concurrency",
        "kv_cache_usage",
        "HF_TOKEN",
    ]
) | st.text(max_size=8)
DOCUMENTS = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
    ),
    max_size=6,
)


@given(DOCUMENTS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_document_gives_a_preset_or_a_problem(document: dict[str, Any], complete: bool) -> None:
    message = None
    try:
        check_document(document, complete=complete)
        assert not complete or isinstance(to_preset(document, name="x", source="x", shipped=False), Preset)
    except Problem as problem:
        message = str(problem)
    assert message is None or (message.isprintable() and len(message) < 600)


@given(st.binary(max_size=400) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(max_examples=60, deadline=None)
def test_any_bytes_give_a_preset_or_a_problem(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mine.toml").write_bytes(data)
        presets, problems = read_presets(Path(folder))
    assert len(presets) == (4 if problems else 5)  # one file may have several problems
    assert all(str(problem).isprintable() for problem in problems)
