"""Learned flags and their validation, compared with real vLLM's parser and configuration."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fakes.forked import Forks
from fakes.plans import plan_with
from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.plan.budget.memory_flags import draft_model
from vllm_launchers.plan.checks.check import check_plan
from vllm_launchers.plan.files import named_files
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.flags import SHORT_NAMES, flag_words
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import engine_at
from vllm_launchers.vllm.flags.changes import Changes, FlagValue
from vllm_launchers.vllm.flags.check_value import refused_together
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.learn import learn_flags
from vllm_launchers.vllm.flags.several_words import REPEATED
from vllm_launchers.vllm.modelfacts.read import model_facts

pytestmark = pytest.mark.real

SETS = 160

OWN_PARSER = """
import json, sys
from vllm.engine import arg_utils
arg_utils.NEEDS_HELP = True  # as with --help on the command line: without it the texts of help are not made
arg_utils._compute_kwargs.cache_clear()
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser

options = {}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    if action.option_strings and action.option_strings != ["-h", "--help"]:
        options[next(word for word in action.option_strings if word.startswith("--"))] = {
            "options": action.option_strings,
            "action": type(action).__name__,
            "nargs": action.nargs,
            "default": repr(action.default),
            "choices": None if action.choices is None else [str(c) for c in action.choices if c not in (None, "None")],
            "help": action.help or "",
            "group": action.container.title,
        }
import vllm.envs
print(json.dumps({"options": options, "variables": sorted(vllm.envs.environment_variables)}))
"""

VERDICTS = """
import contextlib, copy, io, json, logging, os, sys, types, warnings
requests = json.load(sys.stdin)
sys.argv = ["vllm", "serve"]
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
answers, sys.stdout = sys.stdout, sys.stderr
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.entrypoints.cli import serve

# The command itself, up to where it would start a server.
serve.run_server = serve.run_headless = serve.run_multi_api_server = serve.run_dp_supervisor = lambda args: None
serve.uvloop = types.SimpleNamespace(run=lambda server: None)
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
for argv in requests:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # Defaults belong to the parser, and some are changed while a configuration is made.
            args = copy.deepcopy(parser.parse_args(["serve", os.environ["MODEL_FOLDER"], *argv]))
            validate_parsed_serve_args(args)
            validate_api_server_args(args)
            args.model = args.model_tag
            ServeSubcommand.cmd(copy.deepcopy(args))
            AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        answer = ""
    except SystemExit:
        answer = "parser: " + said.getvalue().strip()[-300:]
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(answer), file=answers, flush=True)
"""


def run_real(forks: Forks, model: Path, code: str, given: object = None) -> list[Any]:
    """Run code in real vLLM's Python; returns its output lines parsed as JSON."""
    printed = forks.run(["-c", code], json.dumps(given), {"MODEL_FOLDER": str(model)})
    return [json.loads(line) for line in printed.splitlines() if line.startswith(("{", '"'))]


@pytest.fixture(scope="module")
def own(forks: Forks, tiny_model: Path) -> dict[str, Any]:
    """The real parser's options by their first long name, and the environment variables that real vLLM reads."""
    answer: dict[str, Any] = run_real(forks, tiny_model, OWN_PARSER)[-1]
    return answer


@pytest.fixture(scope="module")
def options(own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name.removeprefix("--"): option for name, option in own["options"].items()}


@pytest.fixture(scope="module")
def learned(real_vllm: Path) -> FlagTable:
    return learn_flags(engine_at(str(real_vllm)))


def test_flag_names_match_vllm(learned: FlagTable, options: dict[str, Any]) -> None:
    assert set(learned.flags) == set(options)
    assert len(options) > 300


def own_default(text: str) -> object:
    """A real default in the table's form, from its ``repr``; None for computed objects.

    Differences that are allowed: enum members are their values, and sets are lists. Configuration objects and defaults
    that are omitted from the namespace (``==SUPPRESS==``) count as no default.
    """
    if text.startswith("<") and ": " in text:
        text = text.partition(": ")[2].rstrip(">")
    try:
        value = [] if text == "set()" else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    if value == "==SUPPRESS==":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return None if value is None else str(value)


def test_defaults_match_vllm(learned: FlagTable, options: dict[str, Any]) -> None:
    own = {name: own_default(option["default"]) for name, option in options.items()}
    # The only configuration whose ``repr`` is that of a dictionary.
    own["compilation-config"] = None
    assert {name: spec.default for name, spec in learned.flags.items()} == own


def test_choices_match_vllm(learned: FlagTable, options: dict[str, Any]) -> None:
    own = {name: tuple(option["choices"] or ()) for name, option in options.items()}
    assert {name: spec.choices for name, spec in learned.flags.items()} == own


def test_flag_forms_match_vllm(learned: FlagTable, options: dict[str, Any]) -> None:
    for name, option in options.items():
        spec = learned.flags[name]
        assert spec.negatable == (option["action"] == "BooleanOptionalAction"), name
        assert spec.many == (option["nargs"] == "+" or option["action"] == "_AppendAction"), name
        assert (name in REPEATED) == (option["action"] == "_AppendAction"), name
        assert spec.bare == (option["nargs"] == "?"), name
        assert (spec.kind is ValueKind.BOOL) == (option["nargs"] == 0), name
        assert {f"--{name}", *spec.aliases} == {o for o in option["options"] if not o.startswith("--no-")}, name
        assert (spec.group or "options") == option["group"], name


def test_all_short_options_are_known(options: dict[str, Any]) -> None:
    short = {word[1:] for option in options.values() for word in option["options"] if not word.startswith("--")}
    assert short <= set(SHORT_NAMES) | {"h", "O"}


def test_help_matches_vllm(learned: FlagTable, options: dict[str, Any]) -> None:
    def plain(text: str) -> str:
        return " ".join(text.replace("%%%%", "%").replace("%%", "%").split())

    for name, option in options.items():
        # The parser appends the notation of JSON and short numbers, and a link to the documentation.
        assert plain(option["help"]).startswith(plain(learned.flags[name].help)), name
    assert sum(bool(spec.help) for spec in learned.flags.values()) > 300


def test_environment_variables_match_vllm(learned: FlagTable, own: dict[str, Any]) -> None:
    assert learned.variables == {name for name in own["variables"] if name.startswith("VLLM_")}


TEXTS = ("", "abc", "1", "1.5", "true", "auto", "0", "{}", "fork", " 7 ", "SPAWN", "INT8", "-1", "a,b")
OWN_VARIABLES = """
import json, logging, os
logging.disable(logging.CRITICAL)
import vllm.envs as envs
refused = {}
for name, read in envs.environment_variables.items():
    before = os.environ.get(name)
    for text in TEXTS:
        os.environ[name] = text
        try:
            read()
        except (ValueError, KeyError, TypeError):
            refused.setdefault(name, []).append(text)
        except Exception:
            pass
    os.environ.pop(name)
    if before is not None:
        os.environ[name] = before
print(json.dumps(refused))
"""


def test_validation_of_variable_values_matches_vllm(learned: FlagTable, forks: Forks, tiny_model: Path) -> None:
    """For every variable and every value, we reject the value exactly if real vLLM does."""
    own = run_real(forks, tiny_model, OWN_VARIABLES.replace("TEXTS", repr(TEXTS)))[-1]
    ours = {
        name: refused
        for name, spec in learned.values.items()
        if (refused := [text for text in TEXTS if spec.problem(text) is not None])
    }
    assert ours == own
    assert len(ours) > 150
    assert learned.reads_all


def test_cpu_build_limits_are_known(learned: FlagTable) -> None:
    assert learned.limits.cpu_block == 32
    assert learned.limits.architectures == ()
    assert learned.limits.capabilities["fp8"] == 75


NEEDS_MORE = {
    *("model", "config", "host", "port", "uds", "api-key", "hf-token"),  # not set by users
    # Need files, the network, a package or another model.
    *("hf-config-path", "chat-template", "log-config-file", "logging-config", "show-hidden-metrics-for-version"),
    *("tokenizer", "revision", "code-revision", "tokenizer-revision", "grpc-port", "grpc", "otlp-traces-endpoint"),
    *("quantization", "quantization-config", "config-format", "default-mm-loras", "runner", "convert", "engram-config"),
    *("enable-expert-parallel", "use-replayssm", "tokenizer-mode", "kv-offloading-size", "additional-config"),
    *("enable-mamba-cache-stochastic-rounding", "kv-transfer-config", "ec-transfer-config", "weight-transfer-config"),
    *("speculative-config", "spec-method", "spec-model", "watermark-config", "diffusion-config", "model-impl"),
    *("model-class-overrides", "media-io-kwargs", "custom-histogram-buckets", "hf-overrides", "pooler-config"),
    # Need a GPU or another machine.
    *("enable-return-routed-experts", "return-sampling-mask", "enable-trace-replay", "enable-sleep-mode", "nnodes"),
    *("enable-cumem-allocator", "device-ids", "prefill-context-parallel-size", "enable-batch-sharded-sampling"),
    *("ubatch-size", "enable-dbo", "kda-prefill-backend", "enable-eplb", "enable-elastic-ep", "numa-bind"),
    *("distributed-executor-backend", "enable-fault-tolerance", "ray-workers-use-nsight", "node-rank"),
    *("decode-context-parallel-size", "pipeline-parallel-size", "data-parallel-backend", "mamba-block-size"),
    *("data-parallel-rank", "data-parallel-start-rank", "data-parallel-external-lb", "data-parallel-hybrid-lb"),
    *("data-parallel-address", "data-parallel-multi-port-external-lb", "kv-cache-dtype", "enable-nccl-comm-suspend"),
    # Rejected by us because a server could not use it, although vLLM accepts the configuration.
    *("default-chat-template-kwargs", "allowed-origins", "allowed-methods", "allowed-headers"),
}
"""Flags whose validity depends on more than the flags; also all multimodal flags (their own group)."""


def few_values(name: str, spec: FlagSpec) -> st.SearchStrategy[FlagValue]:
    """Valid and invalid values of a flag; the valid ones work for this small model on this machine."""
    if name == "tensor-parallel-size":
        return st.sampled_from([1, 2, 0, "x"])
    if name == "data-parallel-size":
        return st.sampled_from([1, 0, -1, "x"])
    if name == "max-model-len":
        return st.sampled_from([64, 512, "4k", "1K", "auto", "-1", 0, -2, "1.5K", "all"])
    if spec.kind is ValueKind.BOOL:
        return st.one_of(st.booleans(), st.sampled_from(["yes", 1]))
    if spec.choices:
        return st.sampled_from([*spec.choices, "nonsense", spec.choices[0].upper() + "x"])
    if spec.closed:
        return st.sampled_from(["nonsense", "auto-matic"])
    if spec.kind is ValueKind.FLOAT:
        return st.one_of(st.sampled_from([0.5, 0.0, 1.0, "0.25", "x", ""]), st.floats(0.125, 2, width=16))
    if spec.kind in (ValueKind.INT, ValueKind.HUMAN_INT):
        return st.one_of(st.integers(0, 4096), st.sampled_from(["16", "1k", "1.5K", 2.5, "x", "", "None", -1]))
    if spec.kind is ValueKind.JSON:
        keys = [part.name for part in spec.parts]
        return st.sampled_from(["{}", "[]", "{", "text", "5", *(['{"nonsense_key": 1}'] if keys else [])])
    return st.sampled_from(["text", "", True])


TOGETHER = (
    *("max-num-seqs", "max-num-batched-tokens", "max-model-len", "enable-chunked-prefill", "max-num-active-seqs"),
    *("long-prefill-token-threshold", "enable-auto-tool-choice", "tool-call-parser", "enable-log-outputs"),
    *("enable-log-requests", "enable-per-request-metrics", "disable-log-stats", "enable-lora", "max-loras"),
    *("max-cpu-loras", "gpu-memory-utilization", "offload-group-size", "offload-num-in-group", "reasoning-parser"),
)
"""Flags that depend on each other, chosen more often so that sets often contain several."""


RESOLVED: dict[str, FlagValue] = {"max-model-len": 4096, "max-num-seqs": 128, "max-num-batched-tokens": 2048}
"""Values that real vLLM computes for this model on a CPU."""


def flag_sets(table: FlagTable) -> st.SearchStrategy[dict[str, FlagValue]]:
    """Sets of up to five flags: flags with dependencies appear more often, sometimes an unknown flag."""
    known = {
        name: spec
        for name, spec in table.flags.items()
        if name not in NEEDS_MORE and spec.group != "MultiModalConfig" and not spec.deprecated
    }
    names = st.one_of(st.sampled_from([n for n in TOGETHER if n in known]), st.sampled_from(sorted(known)))

    @st.composite
    def sets(draw: st.DrawFn) -> dict[str, FlagValue]:
        chosen = draw(st.lists(names, min_size=1, max_size=5, unique=True))
        flags = {name: draw(few_values(name, known[name])) for name in chosen}
        if draw(st.integers(0, 15)) == 0:
            flags["max-num-sequences"] = 4
        return flags

    return sets()


def generated(table: FlagTable) -> list[dict[str, FlagValue]]:
    """Deterministic flag sets for one run of real vLLM; we accept half of them."""
    found: dict[bool, list[dict[str, FlagValue]]] = {True: [], False: []}

    @seed(4)
    @settings(max_examples=SETS * 8, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(flags=flag_sets(table))
    def collect(flags: dict[str, FlagValue]) -> None:
        kind = found[bool(refused_together(table, flags, RESOLVED))]
        if len(kind) < SETS // 2 and flags not in kind:
            kind.append(flags)

    collect()
    return found[True] + found[False]


CONDITIONS: list[dict[str, FlagValue]] = [
    {"max-num-seqs": 64, "max-num-batched-tokens": 32},
    {"max-num-seqs": 32, "max-num-batched-tokens": 32},
    {"enable-chunked-prefill": False, "max-num-batched-tokens": 256, "max-model-len": 512},
    {"enable-chunked-prefill": True, "max-num-batched-tokens": 256, "max-model-len": 512},
    {"max-num-active-seqs": 9, "max-num-seqs": 8},
    {"long-prefill-token-threshold": 600, "max-model-len": 512},
    {"enable-lora": True, "max-loras": 4, "max-cpu-loras": 2},
    {"max-loras": 4, "max-cpu-loras": 2},
    {"enable-lora": True, "max-loras": 0},
    {"data-parallel-size-local": 2},
    {"enable-auto-tool-choice": True},
    {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"},
    {"enable-log-outputs": True},
    {"enable-log-outputs": True, "enable-log-requests": True},
    {"enable-per-request-metrics": True, "disable-log-stats": True},
    {"sse-keep-alive-interval": -1},
    {"tensor-parallel-size": 2, "decode-context-parallel-size": 3},
    {"enable-eplb": True},
    {"data-parallel-external-lb": True},
    {"data-parallel-rank": 0},
    {"data-parallel-hybrid-lb": True},
    {"data-parallel-hybrid-lb": True, "data-parallel-external-lb": True, "data-parallel-size": 2},
    {"data-parallel-multi-port-external-lb": True},
    {"data-parallel-start-rank": 0, "data-parallel-external-lb": True, "data-parallel-rank": 0},
    {"data-parallel-start-rank": 0, "data-parallel-size": 2, "data-parallel-size-local": 1},
    {"data-parallel-hybrid-lb": True, "data-parallel-rank": 0, "data-parallel-size-local": 1},
    {"headless": True, "api-server-count": 1},
    {"headless": True, "api-server-count": 0},
    {"nnodes": 3, "tensor-parallel-size": 2},
    {"nnodes": 2, "tensor-parallel-size": 2, "node-rank": 2},
    {"nnodes": 2, "tensor-parallel-size": 2, "data-parallel-backend": "ray"},
    {"enable-elastic-ep": True},
    {"enable-fault-tolerance": True},
    {"numa-bind-nodes": 0},
    {"numa-bind-cpus": "0-1"},
    {"collect-detailed-traces": "all"},
    {"ray-workers-use-nsight": True},
    {"offload-group-size": 2, "offload-num-in-group": 3},
    {"offload-group-size": 2, "offload-prefetch-step": 0},
    {"mamba-ssu-algorithm": "simple"},
    {"attention-backend": "CPU_ATTN", "attention-config": '{"backend": "CPU_ATTN"}'},
    {"attention-backend": "cpu_attn"},
    {"cudagraph-capture-sizes": 8, "compilation-config.cudagraph_capture_sizes": "[8]"},
    {"max-cudagraph-capture-size": 8, "compilation-config.max_cudagraph_capture_size": 8},
    {"enable-flashinfer-autotune": False, "kernel-config.enable_flashinfer_autotune": False},
    {"spec-tokens": 3},
    {"per-request-spec-decode-metrics": "summary"},
    {"lora-modules": "adapter"},
    {"lora-modules": "name=/path"},
    {"reasoning-parser": "deepseek"},
    {"compilation-config": '{"mod": 3}'},
    {"compilation-config.mode": 0},
    {"compilation-config.modes": 0},
    {"data-parallel-rpc-port": 0},
    {"shutdown-timeout": -1},
    {"data-parallel-backend": "gloo"},
    {"gpu-mem": 0.5},
    {"max-num": 5},
    {"hf-overrides": "text"},
    {"hf-overrides.max_position_embeddings": 4096},
    {"seed": -1},
    {"served-model-name": "1.10"},
    {"quantization": "nonsense"},
    {"optimization-level": "0"},
    {"optimization-level": "9"},
    # Keys of JSON flags.
    {"structured-outputs-config": '{"backend": "nonsense"}'},
    {"structured-outputs-config": '{"bakend": "xgrammar"}'},
    {"structured-outputs-config.backend": "XGRAMMAR"},
    {"structured-outputs-config.backend": "xgrammar"},
    {"structured-outputs-config": '{"disable_any_whitespace": true}'},
    {"structured-outputs-config": '{"disable_any_whitespace": "yes", "backend": "xgrammar"}'},
    {"structured-outputs-config": '{"disable_additional_properties": true, "backend": "xgrammar"}'},
    {"structured-outputs-config": '{"reasoning_parser": 5}'},
    {"kv-transfer-config": '{"kv_connector": "ExampleConnector", "kv_role": "nonsense"}'},
    {"kv-transfer-config": '{"kv_connector": "ExampleConnector"}'},
    {"kv-transfer-config": '{"kv_role": "kv_both"}'},
    {"kv-transfer-config": "{}"},
    {"kv-transfer-config.kv_connector": "ExampleConnector", "kv-transfer-config.kv_role": "kv_both"},
    {"kv-transfer-config": '{"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_port": "x"}'},
    {"ec-transfer-config": '{"ec_connector": "ECExampleConnector"}'},
    {"compilation-config": '{"cudagraph_mode": "NONSENSE"}'},
    {"compilation-config.cudagraph_capture_sizes": "[1, 2"},
    {"speculative-config.num_speculative_tokens": 3},
    {"compilation-config": '{"cudagraph_mode": "full_decode_only"}'},
    {"compilation-config": '{"cudagraph_mode": null}'},
    {"compilation-config": '{"mode": "VLLM_COMPILE"}'},
    {"compilation-config": '{"mode": "vllm"}'},
    {"compilation-config": '{"mode": 7}'},
    {"compilation-config": '{"pass_config": {"fuse": true}}'},
    {"compilation-config": '{"pass_config": {"fuse_norm_quant": null}}'},
    {"compilation-config.pass_config.fuse_act_quant": True},
    {"compilation-config.pass_config.fuse_act_qant": True},
    {"compilation-config": '{"dynamic_shapes_config": {"type": "x"}}'},
    {"compilation-config": '{"cudagraph_num_of_warmups": 1.5}'},
    {"compilation-config": '{"use_inductor_graph_partition": 2}'},
    {"attention-config": '{"backend": "FLASHINFR"}'},
    {"attention-config": '{"backend": "auto"}'},
    {"attention-config": '{"flash_attn_version": "3"}'},
    {"attention-config.flash_attn_version": 3},
    {"kernel-config": '{"moe_backend": "Deep-Gemm"}'},
    {"kernel-config": '{"moe_backend": "x"}'},
    {"profiler-config": '{"profiler": "nsys"}'},
    {"profiler-config": '{"profiler": "torch"}'},
    {"profiler-config": '{"profiler": "cuda"}'},
    {"profiler-config": '{"torch_profiler_dir": "/tmp/traces"}'},
    {"kv-events-config": '{"publisher": "kafka"}'},
    {"eplb-config": '{"window_size": 0}'},
    {"eplb-config.num_redundant_experts": 2},
    {"pooler-config": '{"pooling_type": "mean"}'},
    {"speculative-config": '{"method": "ngrm", "num_speculative_tokens": 3}'},
    {"speculative-config": '{"method": "ngram", "num-speculative-tokens": 3}'},
    {"speculative-config": '{"method": "ngram", "num_speculative_tokens": "3"}'},
    {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3, "tensor_parallel_size": 1}'},
    {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}', "spec-tokens": 3},
    {"speculative-config": '{"method": "eagle", "num_speculative_tokens": 1}'},
    {"speculative-config": '{"num_speculative_tokens": 3}'},
    {"speculative-config": '{"method": "eagle3"}'},
    {"spec-method": "mtp"},
    {"speculative-config.method": "dspark"},
    {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}'},
    {"compilation-config": '{"custom_ops": ["all", "none"]}'},
    {"compilation-config.custom_ops+": "all,none"},
    {"compilation-config.custom_ops+": "none"},
    {"compilation-config.custom_ops": '["none", "+rms_norm"]'},
    {"ubatch-size": 2},
    {"ubatch-size": 2, "all2all-backend": "nixl_ep"},
    {"ubatch-size": 1},
    {"ubatch-size": 33, "all2all-backend": "nixl_ep"},
    {"ubatch-size": 33, "all2all-backend": "nixl_ep", "dbo-decode-token-threshold": 33},
    {"enable-dbo": True},
    {"enable-dbo": True, "dbo-prefill-token-threshold": 1},
    {"compilation-config.custom_ops": '["rms_norm"]'},
    {"compilation-config": '{"custom_ops": ["+rms_norm", "-rms_norm"]}'},
    {"compilation-config.custom_ops+": "+rms_norm,-silu_and_mul,none"},
    {"limit-mm-per-prompt": "image=2"},
    {"limit-mm-per-prompt": '{"image": 2}'},
    {"limit-mm-per-prompt": '{"image": "two"}'},
    {"limit-mm-per-prompt": '{"image": {"count": 2}}'},
    {"limit-mm-per-prompt.image": "two"},
    {"limit-mm-per-prompt.image": 2},
    {"media-io-kwargs": '{"image": 1}'},
    {"speculative-config": "{}"},
    {"speculative-config": '{"draft_tensor_parallel_size": 1}'},
    {"spec-method": "ngram", "spec-model": "package.Drafts", "speculative-config": '{"prompt_lookup_max": 2}'},
    {"spec-model": "package.Drafts", "spec-tokens": 3},
    {"spec-model": "package.Drafts"},
    {"spec-method": "custom_class", "spec-tokens": 3},
    {"spec-method": "ngram", "spec-tokens": 3, "speculative-config.use_heterogeneous_vocab": True},
    {"spec-method": "ngram", "spec-tokens": 3, "speculative-config.index_share_for_mtp_iteration": True},
    {"spec-method": "ngram", "spec-tokens": 3, "speculative-config.synthetic_acceptance_length": 2},
    {
        "spec-method": "ngram",
        "spec-tokens": 3,
        "speculative-config": '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}',
    },
    {"enable-lora": True, "spec-method": "ngram", "spec-tokens": 15},
    {"enable-lora": True, "spec-method": "ngram", "spec-tokens": 16},
    {"speculative-config": "null"},
    {"watermark-config": "null"},
    {"custom-histogram-buckets": "null"},
    {"compilation-config": "null"},
    {"seed": 2**64 - 1},
    {"attention-backend": "CPU_ATTN", "attention-config.backend": "auto"},
    # Keys given as separate flags replace the whole object.
    {
        "attention-backend": "CPU_ATTN",
        "attention-config": '{"backend": "CPU_ATTN"}',
        "attention-config.flash_attn_version": 3,
    },
    {"structured-outputs-config": '{"backend": "xgrammar"}', "structured-outputs-config.disable_any_whitespace": True},
    {"lora-modules": '{"name": "a"}'},
    {"lora-modules": '{"name": "a", "path": "/x"}'},
    # Only checked for multimodal models.
    {"mm-processor-cache-gb": -1},
    {"mm-encoder-attn-backend": "nonsense"},
]


PLANS: list[dict[str, FlagValue]] = [
    {"config-format": "hf"},
    {"config-format": "mistral"},
    {"config-format": "HF"},
    {"config-format": "nonsense"},
    {"quantization": "torchao"},
    {"quantization": "online"},
    {"quantization": "awq"},
    {"quantization": "fp8_per_tensor"},
    {"quantization": "int8_per_channel_weight_only"},
    {"default-mm-loras": '{"image": "/adapter"}'},
    {"default-mm-loras": '{"image": "/adapter"}', "enable-lora": True},
    {"default-mm-loras.image": "/adapter"},
    {"default-mm-loras": "{}"},
    {"enable-expert-parallel": True},
    {"spec-method": "suffix"},
    {"speculative-config": '{"method": "suffix", "num_speculative_tokens": 8}'},
    {"spec-method": "mtp", "spec-tokens": 1},
    {"spec-model": "TINY", "spec-tokens": 1},
    {"spec-model": "TINY"},
    {"spec-model": "TINY", "spec-method": "eagle", "spec-tokens": 1},
    {"spec-model": "TINY", "spec-method": "eagle3"},
    {"spec-model": "TINY", "spec-method": "eagle3", "spec-tokens": 1},
    {"spec-model": "TINY", "spec-method": "dflash", "spec-tokens": 1},
    {"spec-model": "TINY", "spec-method": "mtp"},
    {"spec-model": "TINY", "spec-method": "mlp_speculator", "spec-tokens": 1},
    {"tokenizer": "/no/such", "skip-tokenizer-init": True},
    {"tokenizer": "/no/such"},
    {"hf-config-path": "/no/such"},
    {"spec-model": "/no/such", "spec-tokens": 1},
    {"spec-method": "ngram", "spec-model": "/no/such", "spec-tokens": 1},
    {"log-config-file": "/no/such.json"},
    {"logging-config.pylogging_config_file": "/no/such.json"},
    {"chat-template": "/no/such.jinja"},
    {"chat-template": "/{{ messages }}"},
    {"max-model-len": 4097},
    {"max-model-len": "4K"},
    *(
        {"max-model-len": length, "hf-overrides": json.dumps(changed)}
        for changed in (
            {"max_position_embeddings": 2048},
            {"max_position_embeddings": 8192},
            {"model_max_length": 2048},
            {"model_max_length": 8192},
            {"seq_length": 2048},
            {"seq_length": 8192},
            {"max_position_embeddings": 8192, "n_positions": 6000},
            {"sliding_window": 512},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "default"}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        )
        for length in (2048, 4096, 6000, 6001, 8192)
    ),
]
"""Flags whose verdict depends on the model, a draft model (``TINY`` is the model's folder), a file or a package."""


def errors_of_plans(vllm: Path, table: FlagTable, model: Path, sets: Sequence[dict[str, FlagValue]]) -> list[list[str]]:
    """The errors of plans with only these flags."""
    engine, facts, preset = engine_at(str(vllm)), model_facts(str(model)), read_presets(None)[0]["chatbot"]
    found = []
    for flags in sets:
        plan = plan_with(
            replace(preset, flags={}), engine, Changes(set=flags), host="127.0.0.1", port=8000, model=str(model)
        )
        absent = tuple(path for _, path in named_files(flags, str(model)) if not Path(path).exists())
        draft = facts if draft_model(flags) == str(model) else None
        inputs = PlanInputs(facts, table, environment=HostEnvironment(absent=absent), draft=draft)
        every = check_plan(plan, inputs, preset.workload, lambda flags: None, preset.objectives)
        found.append([one.message for one in every if one.level is Level.ERROR])
    return found


def test_errors_of_plans_match_vllm(real_vllm: Path, learned: FlagTable, forks: Forks, tiny_model: Path) -> None:
    sets = [{name: str(tiny_model) if value == "TINY" else value for name, value in one.items()} for one in PLANS]
    ours = errors_of_plans(real_vllm, learned, tiny_model, sets)
    answers = run_real(forks, tiny_model, VERDICTS, [list(flag_words(flags)) for flags in sets])
    assert_alike(sets, ours, answers)


STORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "gptq-ordered": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
    "gptq-one-group": {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True, "sym": True},
    "gptq-asymmetric": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}},
    "modelopt-fp4": {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "group_size": 16},
    "mxfp4": {"quant_method": "mxfp4"},
    "mxfp8": {"quant_method": "mxfp8"},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True},
    "quark": {"quant_method": "quark", "export": {"kv_cache_group": []}},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
}
"""Quantization configs of checkpoints."""

REFUSED_WHEN_LOADED = (("gptq-asymmetric", "moe_wna16"),)
"""Combinations that are only refused when the model is loaded, because their linear layers are those of GPTQ."""

METHODS = """
import json, logging, sys
folders = json.load(sys.stdin)
logging.disable(logging.CRITICAL)
answers, sys.stdout = sys.stdout, sys.stderr
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.model_loader.weight_utils import get_quant_config

for folder in folders:
    for method in (None, *QUANTIZATION_METHODS):
        try:
            args = AsyncEngineArgs(model=folder, quantization=method)
            model = args.create_model_config()
            if model.quantization is not None:
                get_quant_config(model, args.create_load_config())
            answer = ""
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"folder": folder, "method": method, "answer": answer}), file=answers, flush=True)
"""


def test_quantizations_of_checkpoints_match_vllm(
    real_vllm: Path, learned: FlagTable, forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    """For each format and method, both reject or both accept."""
    config = json.loads((tiny_model / "config.json").read_text())
    for name, stored in STORED.items():
        shutil.copytree(tiny_model, tmp_path / name)
        own = {**config, "quantization_config": stored} if stored else config
        (tmp_path / name / "config.json").write_text(json.dumps(own))
    answers = run_real(forks, tiny_model, METHODS, [str(tmp_path / name) for name in STORED])
    assert len(answers) > 20 * len(STORED)
    sets: list[dict[str, FlagValue]] = [{"quantization": one["method"]} if one["method"] else {} for one in answers]
    ours = [
        errors_of_plans(real_vllm, learned, Path(one["folder"]), [flags])[0]
        for one, flags in zip(answers, sets, strict=True)
    ]
    names = [Path(one["folder"]).name for one in answers]
    loaded = [
        "when it is loaded" if (name, one["method"]) in REFUSED_WHEN_LOADED else one["answer"]
        for name, one in zip(names, answers, strict=True)
    ]
    assert_alike([{"checkpoint": name, **flags} for name, flags in zip(names, sets, strict=True)], ours, loaded)


@pytest.fixture(scope="module")
def verdicts(learned: FlagTable, forks: Forks, tiny_model: Path) -> tuple[list[dict[str, FlagValue]], list[str]]:
    """All flag sets (those with dependencies first) and real vLLM's verdicts on them, from one process."""
    sets = [*CONDITIONS, *generated(learned)]
    return sets, run_real(forks, tiny_model, VERDICTS, [list(flag_words(flags)) for flags in sets])


def test_verdicts_on_findings_match_vllm(
    learned: FlagTable, verdicts: tuple[list[dict[str, FlagValue]], list[str]]
) -> None:
    sets, answers = verdicts
    check(learned, sets[: len(CONDITIONS)], answers[: len(CONDITIONS)])


def test_verdicts_on_generated_flag_sets_match_vllm(
    learned: FlagTable, verdicts: tuple[list[dict[str, FlagValue]], list[str]]
) -> None:
    sets, answers = verdicts
    assert len(sets) - len(CONDITIONS) >= 100
    check(learned, sets[len(CONDITIONS) :], answers[len(CONDITIONS) :])


def check(table: FlagTable, sets: Sequence[dict[str, FlagValue]], answers: Sequence[str]) -> None:
    ours = [refused_together(table, flags, RESOLVED) for flags in sets]
    assert_alike(sets, ours, answers)


def assert_alike(
    sets: Sequence[dict[str, FlagValue]], ours: Sequence[Sequence[object]], answers: Sequence[str]
) -> None:
    """We and real vLLM accept the same sets, and each does both."""
    assert len(answers) == len(sets)
    differing = [
        f"{flags}\n  ours: {mine or 'takes it'}\n  vLLM: {answer or 'takes it'}"
        for flags, mine, answer in zip(sets, ours, answers, strict=True)
        if bool(mine) != bool(answer)
    ]
    assert not differing, "\n".join(differing)
    assert any(ours)
    assert not all(ours)
