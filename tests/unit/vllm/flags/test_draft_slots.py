"""What a sequence takes of each step with speculative decoding, by method and release."""

from __future__ import annotations

import json

import pytest

from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.flags.speculation import sequence_tokens
from vllm_launchers.vllm.release_defaults import Release


@pytest.mark.parametrize(
    ("method", "parallel", "release", "tokens"),
    [
        ("ngram", False, (0, 33, 0), 16),
        ("eagle3", False, (0, 30, 0), 16),
        ("eagle3", True, (0, 16, 0), 16),
        ("eagle3", True, (0, 17, 0), 30),
        ("eagle3", True, (0, 33, 0), 30),
        ("draft_model", False, (0, 16, 0), 16),
        ("draft_model", False, (0, 17, 0), 17),
        ("draft_model", False, (0, 33, 0), 17),
        ("draft_model", True, (0, 24, 0), 31),
        ("draft_model", True, (0, 33, 0), 31),
        ("dflash", False, (0, 27, 0), 30),
        ("dflash", False, (0, 28, 0), 31),
        ("dflash", True, (0, 32, 0), 31),
        ("dflash", True, (0, 33, 0), 16),
        ("dspark", False, (0, 25, 0), 30),
        ("dspark", False, (0, 32, 0), 30),
        ("dspark", False, (0, 33, 0), 16),
    ],
)
def test_running_sequence_takes_its_drafts_and_slots(
    method: str, parallel: bool, release: Release, tokens: int
) -> None:
    config = {"method": method, "model": "org/draft", "num_speculative_tokens": 15, "parallel_drafting": parallel}
    flags: Flags = {"speculative-config": json.dumps(config)}
    assert sequence_tokens(flags, release) == tokens


def test_sequence_without_drafts_takes_one_token() -> None:
    assert sequence_tokens({}, None) == 1
