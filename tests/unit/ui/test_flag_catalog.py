"""Flags of one vLLM, the common ones first; that vLLM determines whether typed values are valid."""

from __future__ import annotations

import pytest

from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.flag_edits import FlagEdits
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.releases import RELEASES, release_table


@pytest.fixture
def catalog(fakes):
    return FlagCatalog(fakes.FLAG_TABLE)


def test_table_decides_the_flags_and_common_ones_come_first(catalog, fakes):
    assert set(catalog.names) == set(fakes.FLAG_TABLE.flags)
    assert list(catalog.names).index("kv-transfer-config") == len(catalog.names) - 1, "the only one that is not common"
    assert catalog.source == f"all {len(fakes.FLAG_TABLE.flags)} flags of vLLM 0.33.0"


def test_short_meanings_are_kept_and_the_rest_is_vllms(catalog):
    facts = catalog.facts("max-num-seqs")
    assert facts.meaning.startswith("Maximum number of running requests")
    assert facts.help == "The most sequences processed in one step."
    other = catalog.facts("kv-transfer-config")
    assert (other.meaning, other.group) == ("Distributed KV transfer", "VllmConfig")
    assert catalog.facts("kv-cache-dtype").choices == ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
    assert catalog.facts("enforce-eager").default == "off"
    assert catalog.facts("nonsense") is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max-num-seqs", " 64 ", 64),
        ("max-model-len", "8K", "8K"),
        ("max-model-len", "8192", 8192),
        ("max-model-len", "auto", "auto"),
        ("gpu-memory-utilization", "1", 1.0),
        ("gpu-memory-utilization", ".9", 0.9),
        ("enforce-eager", "on", True),
        ("enforce-eager", "No", False),
        ("kv-cache-dtype", "fp8", "fp8"),
        ("kv-transfer-config", '{"a": 1}', '{"a": 1}'),
        ("kv-transfer-config.kv_role", "kv_both", "kv_both"),
        ("kv-transfer-config.kv_rank", "1", 1),
        ("kv-transfer-config.kv_buffer_device", "off", False),
    ],
)
def test_typed_values_get_the_flags_type(catalog, name, text, value):
    read = catalog.value(name, text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max-num-seqs", "many"),
        ("max-num-seqs", "1.5"),
        ("max-num-seqs", "0"),
        ("max-num-seqs", ""),
        ("max-model-len", "1.5K"),
        ("gpu-memory-utilization", "1.2"),
        ("gpu-memory-utilization", "nearly all"),
        ("enforce-eager", "maybe"),
        ("kv-cache-dtype", "fp7"),
        ("kv-transfer-config", "{"),
        ("max-num-sequences", "7"),
    ],
)
def test_value_that_vllm_would_refuse_is_refused_in_one_sentence(catalog, name, text):
    with pytest.raises(FlagError) as refused:
        catalog.value(name, text)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_name_is_refused_with_the_nearest(catalog):
    with pytest.raises(FlagError, match="max-num-seqs"):
        catalog.named("max_num_sequenzes")
    assert catalog.named("--Max_Num_Seqs") == "max-num-seqs"
    assert catalog.named("tensor") == "tensor-parallel-size", "vLLM would take the beginning; it is written out"
    assert catalog.named("kv-transfer-config.kv_role") == "kv-transfer-config.kv_role"
    with pytest.raises(FlagError):
        catalog.named("api-key")
    assert FlagCatalog().named("max-num-sequenzes") == "max-num-sequenzes", "unknown to us is not unknown to vLLM"
    assert "max-num-seqs" in FlagCatalog().unknown("max-num-sequenzes")
    with pytest.raises(FlagError, match=r"no longer has --swap-space: .*kv-offloading-size"):
        catalog.value("swap-space", "4")
    assert "no longer" in catalog.no_match("swap_space=4")
    assert catalog.no_match("kv-cache-dtyp=1") == "no flag matches 'kv-cache-dtyp'; did you mean kv-cache-dtype?"
    assert catalog.closest("kv-cache-dtyp") == "kv-cache-dtype"


def test_unknown_vllm_is_not_refused_what_the_newest_release_refuses():
    catalog = FlagCatalog()
    assert catalog.source == f"all {len(catalog.names)} flags of vLLM {RELEASES[-1]}, assumed"
    assert "scheduling-policy" in catalog.names
    typed = [("max-num-seqs", "many"), ("max-num-seqs", "8"), ("swap-space", "4"), ("own-flag", "on")]
    assert [catalog.value(*one) for one in typed] == ["many", 8, 4, True]
    with pytest.raises(FlagError, match="needs a value: a whole number"):
        catalog.value("max-num-seqs", " ")


def test_space_cycles_through_a_flags_values(catalog):
    assert catalog.next_value("enforce-eager", None) is True
    assert catalog.next_value("enforce-eager", True) is False
    released = FlagCatalog(release_table(RELEASES[-1]))
    assert released.facts("aggregate-engine-logging").default == "off"
    on = next(spec.name for spec in released.table.flags.values() if spec.default == "true")
    assert released.next_value(on, None) is False
    assert catalog.next_value("kv-cache-dtype", None) == "bfloat16", "the first that is not the default"
    assert catalog.next_value("kv-cache-dtype", "fp8_e5m2") == "auto"
    assert catalog.next_value("max-num-seqs", 7) is None
    assert catalog.next_value("max-model-len", 4096) is None, "a length is typed, although a word is accepted too"
    assert catalog.next_value("nonsense", "x") is None


def test_search_covers_name_meaning_and_help_best_first(catalog):
    edits = FlagEdits({"max-model-len": 4096, "own-flag": 1})
    assert catalog.matching(edits, "")[:2] == ["max-model-len", "own-flag"]
    assert catalog.matching(edits, "kv_cache")[0] == "kv-cache-dtype"
    assert catalog.matching(edits, "--kv cache dtype")[0] == "kv-cache-dtype"
    assert "gpu-memory-utilization" in catalog.matching(edits, "fraction"), "vLLM's own help"
    assert "enable-prefix-caching" in catalog.matching(edits, "prompt prefixes"), "our short meaning"
    assert "own-flag" in catalog.matching(edits, "own")
    assert catalog.matching(edits, "zzz") == []
    assert catalog.matching(edits, "", only_set=True) == ["max-model-len", "own-flag"]


def test_text_from_a_table_is_plain():
    spec = FlagSpec("odd", ValueKind.TEXT, "\x1b[31mred", help="One\x1b[2J thing.\nAnother.", group="G\x07")
    facts = FlagCatalog(FlagTable("1.0", "installation", {"odd": spec})).facts("odd")
    assert "\x1b" not in facts.default + facts.help + facts.group
    assert facts.meaning == "One thing"
