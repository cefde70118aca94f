"""The common flags and their meanings, and names of flags as typed."""

from __future__ import annotations

import pytest

from vllm_launchers.plan.common_flags import COMMON_FLAGS, common_flag, flag_name
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.vllm.flags.changes import change_text, flag_text
from vllm_launchers.vllm.flags.releases import assumed_table


def test_common_flags_are_flags_of_the_newest_release():
    names = [flag.name for flag in COMMON_FLAGS]
    assert len(names) == len(set(names))
    assert len(names) >= 60
    for flag in COMMON_FLAGS:
        assert flag_name(flag.name) == flag.name, "none is refused as a change"
        assert 0 < len(flag.meaning) <= 90
        spec = assumed_table().flags[flag.name]
        assert not spec.default or not flag.derived, "vLLM has a default of its own"
        assert not (spec.choices or spec.words) or not flag.words, "the table has the values"


@pytest.mark.parametrize("name", ["--Max_Num_Seqs", "max-num-seqs", " max_num_seqs "])
def test_names_are_normalized(name):
    assert flag_name(name) == "max-num-seqs"


@pytest.mark.parametrize("name", ["api-key", "--port", "model", "", "a b", "--"])
def test_names_that_cannot_be_set_here(name):
    with pytest.raises(FlagError):
        flag_name(name)


def test_values_are_formatted_as_typed():
    assert [flag_text(value) for value in (True, False, None, 0.9, "8K")] == ["on", "off", "–", "0.9", "8K"]
    assert change_text("enforce-eager", None, True) == "enforce-eager unset → on"
    assert common_flag("nope") is None
