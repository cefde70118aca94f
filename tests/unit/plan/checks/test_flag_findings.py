"""Findings about flags and variables before a launch: each check fires on a constructed case and not on a valid one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.checks.check import errors
from vllm_launchers.plan.checks.flags import EngineFacts, flag_findings
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.releases import RELEASES, release_table
from vllm_launchers.vllm.removed_flags import REMOVED_FLAGS

ERROR, WARNING, ADVICE = Level.ERROR, Level.WARNING, Level.ADVICE


def findings(flags: Any = None, environment: Any = None, version: str = "0.33.0") -> list[PlanFinding]:
    return flag_findings(flags or {}, environment or {}, EngineFacts(release_table(version)))


def only(flags: Any = None, environment: Any = None, version: str = "0.33.0") -> PlanFinding:
    (finding,) = findings(flags, environment, version)
    return finding


@pytest.mark.parametrize("version", RELEASES[2:])
@pytest.mark.parametrize("name", ["chatbot", "code-generation", "long-document", "batch"])
def test_shipped_presets_are_valid_in_every_release(name: str, version: str) -> None:
    preset = read_presets(None)[0][name]
    flags = {flag: setting.value for flag, setting in preset.flags.items()}
    assert findings(flags, {"HF_HOME": "/models", "VLLM_LOGGING_LEVEL": "DEBUG"}, version) == []


GOOD: list[dict[str, Any]] = [
    {"compilation-config.mode": 3},
    {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    {"speculative-config.method": "[ngram]", "speculative-config.num_speculative_tokens": 3},
    {"compilation-config.cudagraph_capture_sizes": "[1, 2]"},
    {"compilation-config.cudagraph_capture_sizes+": "1,2"},
    {"quantization": "awq", "kv-cache-dtype": "fp8", "max-model-len": "4k"},
    {"attention-backend": "flashinfer"},
    {"disable-log-stats": False, "enable-chunked-prefill": False},
    {"served-model-name": "1.10"},
    {"max-model-len": "auto"},
]


@pytest.mark.parametrize("version", ["0.11.0", "0.20.0", "0.33.0"])
@pytest.mark.parametrize("method", [{}, {"method": "eagle3"}])
@pytest.mark.parametrize(("own_draft", "levels"), [(False, [Level.ERROR]), (True, []), (None, [Level.WARNING])])
def test_a_model_in_the_speculators_format_needs_no_draft_model(
    own_draft: bool | None, levels: list[Level], method: dict[str, str], version: str
) -> None:
    flags: Any = {"speculative-config": json.dumps({"num_speculative_tokens": 3, **method})}
    engine = EngineFacts(release_table(version), own_draft=own_draft)
    found = flag_findings(flags, {}, engine)
    assert [one.level for one in found] == levels
    assert all("--speculative-config needs model" in one.message for one in found)
    assert flag_findings({**flags, "max-num-seqs": 0}, {}, engine) != []


@pytest.mark.parametrize("flags", GOOD)
def test_nothing_is_reported_for_valid_flags(flags: dict[str, Any]) -> None:
    assert findings(flags) == []


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ({"max-num-seq": 64}, Changes(set={"max-num-seqs": 64}, unset=("max-num-seq",))),
        ({"gpu-memory-utilisation": 0.9}, Changes({"gpu-memory-utilization": 0.9}, ("gpu-memory-utilisation",))),
        ({"enable-prefix-cache": True}, Changes({"enable-prefix-caching": True}, ("enable-prefix-cache",))),
        ({"dpa": "10.0.0.1"}, Changes({"data-parallel-address": "10.0.0.1"}, ("dpa",))),
    ],
)
def test_typo_is_named_and_corrected(flags: dict[str, Any], fix: Changes) -> None:
    finding = only(flags)
    (name,) = fix.set
    if finding.level is WARNING:
        assert "is short for" in finding.message
    assert (finding.code, finding.fix) == ("flag_unknown", fix)
    assert f"--{name}" in finding.message


@pytest.mark.parametrize(
    ("flags", "whole"),
    [
        ({"compilation-config.cudagraph_capture_sizes": "[1, 2"}, "[1, 2]"),
        ({"hf-overrides.rope_parameters": '{"rope_type": [1'}, '{"rope_type": [1]}'),
        ({"compilation-config.cudagraph_capture_sizes": "[1, 2,]"}, None),
        ({"compilation-config": '{"mode": 3'}, '{"mode": 3}'),
    ],
)
def test_incomplete_json_is_completed(flags: dict[str, Any], whole: str | None) -> None:
    """The keys of a release that is not installed are unknown; vLLM then treats a key's value as text."""
    finding = only(flags)
    (name,) = flags
    assert (finding.code, finding.level, finding.surely) == ("flag_value", ERROR, "." not in name)
    assert finding.fix == (Changes(set={name: whole}) if whole else None)


def test_dissimilar_name_is_refused_without_a_fix() -> None:
    finding = only({"no-such-thing-at-all": 1})
    assert (finding.code, finding.level, finding.fix) == ("flag_unknown", ERROR, None)
    assert finding.message == "vLLM 0.33.0 has no --no-such-thing-at-all"


def test_name_between_two_similar_ones_is_not_corrected() -> None:
    """``max-loras`` and ``max-cpu-loras`` are equally similar."""
    finding = only({"max-xpu-lora": 1})
    assert finding.code == "flag_unknown"
    assert "did you mean --max-cpu-loras?" in finding.message


def test_value_of_the_misspelled_flag_wins() -> None:
    """The preset sets the flag, and the user meant to change it."""
    fix = only({"max-num-seqs": 256, "max-num-sequences": 32}).fix
    assert fix == Changes({"max-num-seqs": 32}, ("max-num-sequences",))


def test_unique_prefix_is_written_out() -> None:
    finding = only({"gpu-mem": 0.9})
    assert (finding.code, finding.level) == ("flag_unknown", WARNING)
    assert finding.fix == Changes({"gpu-memory-utilization": 0.9}, ("gpu-mem",))


def test_ambiguous_prefix_is_refused() -> None:
    finding = only({"max-num": 5})
    assert (finding.code, finding.level, finding.fix) == ("flag_unknown", ERROR, None)
    assert "it could be --max-num-active-seqs or --max-num-batched-tokens or" in finding.message


@pytest.mark.parametrize(
    ("version", "code", "level", "part"),
    [
        ("0.33.0", "flag_dead", WARNING, "only as the negation of another flag"),
        ("0.17.1", "flag_dead", ERROR, "removed in 0.17"),
        ("0.12.0", "flag_deprecated", ADVICE, "is deprecated"),
    ],
)
def test_log_requests_over_the_releases(version: str, code: str, level: Level, part: str) -> None:
    """Removed in 0.17; 0.33 reads every ``disable-x`` as the opposite of ``enable-x``."""
    finding = only({"disable-log-requests": True}, version=version)
    assert (finding.code, finding.level) == (code, level)
    assert part in finding.message
    if code == "flag_dead":
        assert finding.fix == Changes(unset=("disable-log-requests",))


def test_disable_for_enable() -> None:
    old, new = (only({"disable-prefix-caching": True}, version=v) for v in ("0.32.0", "0.33.0"))
    assert (old.code, old.level, new.level) == ("flag_unknown", ERROR, WARNING)
    assert old.fix == new.fix == Changes({"enable-prefix-caching": False}, ("disable-prefix-caching",))


@pytest.mark.parametrize(
    ("flags", "version", "since"),
    [
        ({"swap-space": 4}, "0.33.0", "removed in 0.18"),
        ({"preemption-mode": "swap"}, "0.11.2", "removed in 0.11"),
        ({"scheduler-delay-factor": 0.1}, "0.33.0", "removed in 0.11"),
        ({"lora-extra-vocab-size": 256}, "0.33.0", "removed in 0.12"),
        ({"gguf-file": "x.gguf"}, "0.33.0", "removed long ago"),
        ({"speculative-model": "m", "max-num-seqs": 1}, "0.33.0", "removed long ago"),
        ({"rope-scaling": "{}"}, "0.33.0", "removed in 0.11.1"),
    ],
)
def test_removed_flags(flags: dict[str, Any], version: str, since: str) -> None:
    finding = only(flags, version=version)
    assert (finding.code, finding.level, finding.surely) == ("flag_dead", ERROR, True)
    assert f"vLLM {version} refuses --{next(iter(flags))} ({since})" in finding.message


@pytest.mark.parametrize("name", REMOVED_FLAGS)
def test_key_of_a_removed_flag_has_no_fix(name: str) -> None:
    assert ("flag_dead", None) in [(one.code, one.fix) for one in findings({f"{name}.x": 1})]


def test_accepted_flag_without_effect_is_a_warning() -> None:
    finding = only({"swap-space": 4}, version="0.17.1")
    assert (finding.code, finding.level) == ("flag_dead", WARNING)
    assert findings({"swap-space": 4}, version="0.10.2") == []


def test_replacement_missing_in_this_release_is_not_offered() -> None:
    """``kv-offloading-size`` was added in 0.11.2."""
    assert only({"swap-space": 4}, version="0.11.0").fix == Changes(unset=("swap-space",))
    assert only({"swap-space": 4}, version="0.21.0").fix == Changes({"kv-offloading-size": 4}, ("swap-space",))


def test_replacement_that_needs_another_flag_is_not_offered() -> None:
    """Before 0.21, ``kv-offloading-size`` alone prevents the start, or has no effect."""
    for version in ("0.13.0", "0.18.1", "0.20.0"):
        assert only({"swap-space": 4}, version=version).fix == Changes(unset=("swap-space",))


def test_both_flags_of_an_old_pair_offer_the_same_fix() -> None:
    found = findings({"speculative-model": "m", "num-speculative-tokens": 3})
    assert [finding.code for finding in found] == ["flag_dead", "flag_dead"]
    assert found[0].fix == found[1].fix
    assert found[0].fix is not None
    assert findings(found[0].fix.set) == []


@pytest.mark.parametrize(
    ("flag", "value", "version", "since"),
    [
        ("attention-backend", "FLASHINFER", "0.12.0", "0.13.0"),
        ("kv-cache-memory-bytes", 10**9, "0.10.1", "0.10.2"),
        ("spec-method", "mtp", "0.20.2", "0.22.1"),
    ],
)
def test_flags_that_a_release_does_not_have_yet(flag: str, value: Any, version: str, since: str) -> None:
    finding = only({flag: value}, version=version)
    assert (finding.code, finding.level, finding.fix) == ("flag_too_new", ERROR, Changes(unset=(flag,)))
    assert since in finding.message
    assert findings({flag: value}, version=since) == []


@pytest.mark.parametrize(
    ("value", "version", "fix"),
    [
        ("squeezellm", "0.8.5", None),
        ("gguf", "0.24.0", None),
        ("bitsandbytes", "0.28.0", None),
        ("auto-round", "0.33.0", Changes({"quantization": "inc"})),
        ("awqq", "0.33.0", Changes({"quantization": "awq"})),
    ],
)
def test_unknown_quantizations(value: str, version: str, fix: Changes | None) -> None:
    finding = only({"quantization": value}, version=version)
    assert (finding.code, finding.level, finding.fix) == ("flag_value", ERROR, fix)
    assert f"--quantization {value}" in finding.message


@pytest.mark.parametrize(("value", "version"), [("gguf", "0.23.0"), ("bitsandbytes", "0.27.1")])
def test_quantizations_before_their_removal(value: str, version: str) -> None:
    assert findings({"quantization": value}, version=version) == []


@pytest.mark.parametrize(
    ("flags", "suggestion"),
    [
        ({"kv-cache-dtype": "fp8_e4m"}, "fp8_e4m3"),
        ({"load-format": "safetensor"}, "safetensors"),
        ({"config-format": "mistrl"}, "mistral"),
        ({"config-format": "HF"}, "hf"),
    ],
)
def test_choices_that_plugins_may_extend(flags: dict[str, Any], suggestion: str) -> None:
    finding = only(flags)
    assert (finding.code, finding.level, finding.surely) == ("flag_value", ERROR, False)
    assert finding.fix == Changes(dict.fromkeys(flags, suggestion))


def test_fix_of_a_value_is_not_that_of_another_problem() -> None:
    found = findings({"spec-method": "[ngram]", "spec-model": "[ngram]"})
    assert [one.fix for one in found if "takes" in one.message] == [Changes({"spec-method": "ngram"})]
    assert [one.fix for one in found if "needs --spec-tokens" in one.message] == [None]


def with_keys(name: str, *parts: FlagSpec) -> FlagTable:
    """The newest release, with a JSON flag's keys as learned from an installation's source."""
    table = release_table("0.32.0")
    return replace(table, flags={**table.flags, name: replace(table.flags[name], parts=parts)})


def test_key_value_gets_the_nearest_choice() -> None:
    table = with_keys(
        "structured-outputs-config", FlagSpec("backend", ValueKind.TEXT, choices=("xgrammar", "guidance"))
    )
    (finding,) = flag_findings({"structured-outputs-config.backend": "xgramar"}, {}, EngineFacts(table))
    assert (finding.code, finding.level, finding.surely) == ("flag_value", ERROR, True)
    assert "takes xgrammar or guidance, not 'xgramar'; did you mean xgrammar?" in finding.message
    assert finding.fix == Changes({"structured-outputs-config.backend": "xgrammar"})
    assert flag_findings({"structured-outputs-config.backend": "guidance"}, {}, EngineFacts(table)) == []


def test_object_that_vllm_drops_is_named() -> None:
    whole = {"compilation-config": '{"mode": 0}', "structured-outputs-config": "{}"}
    (finding,) = findings({**whole, "compilation-config.backend": "eager"})
    assert (finding.code, finding.level, finding.fix) == ("flag_value", WARNING, None)
    assert "ignores --compilation-config, since its keys are set separately (compilation-config.backend)" in (
        finding.message
    )
    assert findings(whole) == []


def test_unknown_connector() -> None:
    words = ("NixlConnector", "ExampleConnector")
    name, role = "kv-transfer-config", FlagSpec("kv_role", ValueKind.TEXT)
    table = with_keys(name, FlagSpec("kv_connector", ValueKind.TEXT, words=words), role,
                      FlagSpec("kv_connector_module_path", ValueKind.TEXT))  # fmt: skip
    flags = {f"{name}.kv_connector": "NixlConector", f"{name}.kv_role": "kv_both"}
    (finding,) = flag_findings(flags, {}, EngineFacts(table))
    assert (finding.code, finding.level, finding.surely) == ("flag_value", ERROR, False)
    assert "did you mean NixlConnector?" in finding.message
    assert finding.fix == Changes({f"{name}.kv_connector": "NixlConnector"})
    (other,) = flag_findings({**flags, f"{name}.kv_connector": "FooConnector"}, {}, EngineFacts(table))
    assert (other.fix, "did you mean" in other.message) == (None, False)
    (whole,) = flag_findings({name: '{"kv_connector": "Own", "kv_role": "kv_both"}'}, {}, EngineFacts(table))
    assert "it has NixlConnector, ExampleConnector" in whole.message
    assert flag_findings({**flags, f"{name}.kv_connector_module_path": "own.module"}, {}, EngineFacts(table)) == []
    assert flag_findings({**flags, f"{name}.kv_connector": "ExampleConnector"}, {}, EngineFacts(table)) == []


@pytest.mark.parametrize("flags", [{"mm-processor-cache-gb": -1}, {"mm-encoder-attn-backend": "nonsense"}])
def test_image_values_are_refused_only_for_multimodal_models(flags: dict[str, Any]) -> None:
    table = with_keys("structured-outputs-config")
    known = FlagSpec("mm-encoder-attn-backend", ValueKind.TEXT, words=("FLASH_ATTN",), closed=True,
                     group="MultiModalConfig")  # fmt: skip
    table = replace(table, flags={**table.flags, known.name: known})
    assert flag_findings(flags, {}, EngineFacts(table)) == []
    (finding,) = flag_findings(flags, {}, EngineFacts(table, multimodal=True))
    assert (finding.code, finding.level) == ("flag_value", ERROR)


def test_unknown_attention_backend() -> None:
    finding = only({"attention-backend": "FLASHINFR"})
    assert (finding.code, finding.level, finding.surely) == ("flag_value", ERROR, True)
    assert finding.fix == Changes({"attention-backend": "FLASHINFER"})


def test_switch_that_cannot_be_turned_off() -> None:
    finding = only({"disable-uvicorn-access-log": False, "disable-log-stats": False}, version="0.8.5")
    assert (finding.code, finding.level) == ("flag_value", ERROR)
    assert finding.fix == Changes(unset=("disable-uvicorn-access-log",))


def test_values_that_the_parser_refuses() -> None:
    for flags in ({"max-num-seqs": "many"}, {"gpu-memory-utilization": 1.5}, {"dtype": "foo"}, {"max-num-seqs": 0}):
        finding = only(flags)
        assert (finding.code, finding.level, finding.surely) == ("flag_value", ERROR, True)


def test_similar_choice_is_offered() -> None:
    assert only({"dtype": "bfloat1"}).fix == Changes({"dtype": "bfloat16"})


def test_deprecated_flag() -> None:
    finding = only({"log-config-file": "/l.json"})
    assert (finding.code, finding.level) == ("flag_deprecated", ADVICE)
    assert "logging-config.pylogging_config_file" in finding.message


@pytest.mark.parametrize(("version", "reported"), [("0.27.1", True), ("0.32.0", True), ("0.33.0", False)])
def test_config_file_drops_false(version: str, reported: bool) -> None:
    found = findings({"config": "/c.yaml"}, version=version)
    assert [finding.code for finding in found] == (["config_drops_false"] if reported else [])


@pytest.mark.parametrize(
    ("environment", "version", "part"),
    [
        (
            {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
            "0.15.1",
            "silently ignores VLLM_ATTENTION_BACKEND",
        ),
        ({"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, "0.33.0", "does not read VLLM_ATTENTION_BACKEND:"),
        ({"VLLM_USE_V1": "1"}, "0.33.0", "there is only V1"),
        ({"VLLM_LOG_LEVEL": "DEBUG"}, "0.33.0", "VLLM_LOGGING_LEVEL"),
        ({"VLLM_TEST_FORCE_FP8_MARLIN": "1"}, "0.33.0", "0.28.0 was the last"),
    ],
)
def test_variables_without_effect(environment: dict[str, str], version: str, part: str) -> None:
    finding = only(environment=environment, version=version)
    assert (finding.code, finding.level) == ("variable_dead", WARNING)
    assert part in finding.message


def test_variable_becomes_a_flag() -> None:
    finding = only(environment={"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    assert finding.fix == Changes({"attention-backend": "FLASHINFER"})


def test_variables_that_are_read_are_not_reported() -> None:
    good = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_KVCACHE_SPACE": "2", "OTHER": "1", "VLLMCONSOLE_STATE": "/s"}
    assert findings(environment=good) == []
    assert findings(environment={"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, version="0.14.1") == []


def test_unknown_variables() -> None:
    finding = only(environment={"VLLM_LOGING_LEVEL": "DEBUG"})
    assert (finding.code, finding.level) == ("variable_unknown", WARNING)
    assert "did you mean VLLM_LOGGING_LEVEL?" in finding.message


def test_variables_of_later_releases() -> None:
    finding = only(environment={"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"}, version="0.18.1")
    assert finding.code == "variable_unknown"
    assert "releases from 0.20.0 on do" in finding.message


def test_unread_variable_is_an_error_in_strict_mode() -> None:
    finding = only({"fail-on-environ-validation": True}, {"VLLM_FOO_BAR": "1"})
    assert (finding.code, finding.level) == ("variable_unknown", ERROR)


def test_vllm_port_is_not_the_http_port() -> None:
    finding = only(environment={"VLLM_PORT": "8001"})
    assert (finding.code, finding.level) == ("variable_misread", ADVICE)


@pytest.mark.parametrize("version", [None, "nightly", "0.6.3", "0.99.0"])
@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        ({"swap-space": 4}, "flag_dead", "vLLM 0.33.0 refuses --swap-space"),
        ({"block-size": 0}, "flag_value", "vLLM 0.33.0 will not start"),
    ],
)
def test_assumed_flags_are_a_reason_to_warn_without_a_fix(
    find: Callable[..., list[PlanFinding]], flags: dict[str, Any], code: str, part: str, version: str | None
) -> None:
    """The newest release's flags, for a vLLM whose version is unknown or not in the table."""
    found = find(set=flags, version=version)
    (one,) = [one for one in found if one.code == code]
    assert (one.level, one.fix) == (WARNING, None)
    assert part in one.message
    assert not errors(tuple(found))


@pytest.mark.parametrize("version", [None, "nightly", "0.6.3", "0.99.0"])
@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        ({"max-num-sequences": 8}, "flag_unknown", "vLLM 0.33.0 has no --max-num-sequences; did you mean"),
        ({"gpu-memory-utilization": 1.5}, "flag_value", "vLLM 0.33.0 will not start"),
        ({"seed": "many"}, "flag_value", "vLLM 0.33.0 will not start"),
        ({"kv-cache-dtype": "foo"}, "flag_value", "vLLM 0.33.0 does not support --kv-cache-dtype foo"),
    ],
)
def test_what_every_known_release_refuses_is_an_error_that_can_be_forced(
    find: Callable[..., list[PlanFinding]], flags: dict[str, Any], code: str, part: str, version: str | None
) -> None:
    (one,) = errors(tuple(find(set=flags, version=version)))
    assert (one.code, one.fix, one.surely) == (code, None, False)
    assert part in one.message
    assert one.message.endswith("(true of every known release)")


@pytest.mark.parametrize(
    ("version", "doubt"), [("0.99.0", "vLLM 0.99.0 may differ"), (None, "the version of this vLLM is unknown")]
)
def test_why_findings_by_assumed_flags_are_uncertain(
    find: Callable[..., list[PlanFinding]], version: str | None, doubt: str
) -> None:
    (one,) = [one for one in find(set={"swap-space": 4}, version=version) if one.code == "flag_dead"]
    assert one.message.endswith(f"({doubt})")


def test_contradicting_flags() -> None:
    finding = only({"enable-per-request-metrics": True, "disable-log-stats": True})
    assert (finding.code, finding.level) == ("flag_value", ERROR)


def test_too_small_batch_is_reported_elsewhere_with_a_fix() -> None:
    assert findings({"max-num-batched-tokens": 64, "max-num-seqs": 128}) == []
    assert only({"max-num-batched-tokens": 0, "max-num-seqs": 128}).code == "flag_value"


def test_a_step_too_small_for_the_drafts_of_all_sequences_is_reported_here() -> None:
    drafts = '{"model": "a/b", "num_speculative_tokens": 3}'
    batch: Any = {"max-num-seqs": 256, "max-num-batched-tokens": 512}
    finding = only({"enable-lora": True, "speculative-config": drafts, **batch})
    assert (finding.code, finding.level) == ("flag_value", ERROR)
    assert "--max-num-batched-tokens 512 is less than 1024" in finding.message


def test_unknown_flag_is_reported_once() -> None:
    assert [finding.code for finding in findings({"max-nom-seqs": "many"})] == ["flag_unknown"]


def test_long_value_is_cut_in_the_message() -> None:
    assert len(only({"quantization": "x" * 5000}).message) < 200
