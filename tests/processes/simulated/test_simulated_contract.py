"""The simulated engine responds to every request of the table like vLLM 0.32, whose responses were recorded.

``tests/tools/record_api_answers.py`` records them; ``tests/real/test_real_contract.py`` compares with vLLM itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.api_table import CONTEXT, TABLE, WARM_UP, Answer, Case, differences, send
from fakes.simulated_servers import DEADLINE

RECORDED = Path(__file__).with_name("vllm-0.32-answers.json")
TINY = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64,
    "head_dim": 32, "num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": 512,
    "intermediate_size": 128, "tie_word_embeddings": True,
}  # fmt: skip
"""Model dimensions used when the responses were recorded."""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return recorded


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, launcher_in: Any) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    launcher = launcher_in(tmp_path_factory.mktemp("contract"))
    flags = ("--served-model-name", "tiny", "--max-model-len", str(CONTEXT), "--block-size", "32")
    process = launcher(*flags, "--num-gpu-blocks-override", "40", model=str(folder), SIMULATED_SPEED="5").ready()
    yield process.url
    launcher.end()


@pytest.fixture(scope="module")
def client(tiny: str) -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=DEADLINE) as client:
        send(client, tiny, WARM_UP)
        yield client


def test_request_table_is_large_and_has_no_duplicates() -> None:
    names = [case.name for case in TABLE]
    assert len(names) == len(set(names))
    assert sum(case.modelled for case in TABLE) >= 40


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_responses_match_vllm(case: Case, client: httpx.Client, tiny: str, answers: dict[str, Any]) -> None:
    assert differences(case, Answer(**answers[case.name]), send(client, tiny, case)) == []
