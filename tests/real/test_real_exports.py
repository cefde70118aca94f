"""Exported config files, read by the real parser: same arguments as from the command line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fakes.forked import Forks
from fakes.plans import plan_with
from vllm_launchers.plan.checks.flags import EngineFacts, flag_findings
from vllm_launchers.plan.export.shell import config_yaml
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, FlagValue
from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind
from vllm_launchers.vllm.flags.releases import release_table

pytestmark = pytest.mark.real

PARSE = """
import json, sys
sys.argv = ["vllm", "serve"]
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(description="vLLM CLI")
serve = parser.add_subparsers(required=False, dest="subparser")
for command in cmd_init():
    options = command.subparser_init(serve)
def said(argv):
    try:
        read = vars(parser.parse_args(argv))
    except SystemExit as end:
        return f"ended with {end.code}"
    read["model"] = read.pop("model_tag", None) or read["model"]
    return {name: repr(value) for name, value in read.items() if name not in ("config", "dispatch_function")}
cases = json.load(open(sys.stdin.fileno()))
known = {o[2:]: {"choices": [str(c) for c in a.choices or () if c is not None], "negatable": f"--no-{o[2:]}" in
    a.option_strings, "aliases": [x for x in a.option_strings if x not in (o, f"--no-{o[2:]}")], "many": a.nargs == "+"}
    for a in options._actions for o in a.option_strings[:1] if o.startswith("--") and o != "--help"}
print("=====" + json.dumps([[said(argv) for argv in case] for case in cases] + [known]))
"""

NASTY = ['{"a": "b c"}', "it's $HOME %h", "yes", "null", "1.10", "0x10", "a: b # c", "é😀", "-dash", "--x", "", " "]


NAMED: list[dict[str, FlagValue]] = [
    {"max-num-seqs": 8}, {"max-num-seq": 8}, {"max-num": 8}, {"max-nom-seqs": 8}, {"gpu-mem": 0.5}, {"gpu-memory": 0.5},
    {"device-memory-utilization": 0.5}, {"device": "cuda"}, {"swap-space": 4}, {"preemption-mode": "swap"},
    {"scheduler-delay-factor": 0.1}, {"speculative-model": "m"}, {"num-speculative-tokens": 3}, {"task": "embed"},
    {"disable-log-requests": True}, {"disable-prefix-caching": True}, {"enable-prefix": True}, {"enable-p": True},
    {"enable-prefix-cachin": False}, {"lora-extra-vocab-size": 256}, {"guided-decoding-backend": "auto"},
    {"calculate-kv-scales": True}, {"num-scheduler-steps": 8}, {"max-seq-len-to-capture": 8}, {"monokernel": True},
    {"reasoning-effort-map": "{}"}, {"dpa": "127.0.0.1"}, {"tp": 2}, {"headless": False}, {"disable-log-stats": False},
    {"log-config-file": "/l.json"}, {"compilation-config.mode": 3},
    {"compilation-config.use_inductor_graph_partition": True},
    {"max-num-seqs.x": 1}, {"override-attention-dtype": "x"}, {"no-enable-prefix-caching": 3}, {"rope-theta": 1.0},
    {"max-num-partial-prefills": 2}, {"cuda-graph-sizes": 8}, {"worker-use-ray": True}, {"gguf-file": "x"},
]  # fmt: skip
"""Valid, invalid, removed, abbreviated and future names."""


def plan_of(flags: Mapping[str, FlagValue], model: str = "org/some model's") -> Plan:
    engine = Engine(EngineKind.VLLM, ("/opt/venv/bin/vllm",), "0.32.0", "cuda", "")
    return plan_with(read_presets(None)[0]["chatbot"], engine, Changes(flags), host="127.0.0.1", port=8123, model=model)


def any_value(spec: FlagSpec, chance: random.Random) -> FlagValue:
    if spec.kind is ValueKind.BOOL:
        return chance.random() < 0.5
    if spec.choices:
        return chance.choice(spec.choices)
    match spec.kind:
        case ValueKind.INT:
            return chance.randint(1, 4096)
        case ValueKind.HUMAN_INT:
            return chance.choice([4096, "4k", "4K"])
        case ValueKind.FLOAT:
            return round(chance.random(), 3)
        case ValueKind.JSON:
            return "{}"
        case ValueKind.JSON_LIST:
            return '["*"]'
    return chance.choice(NASTY)


def flag_sets(count: int) -> list[dict[str, FlagValue]]:
    """Deterministic sets of flags of 0.32 with values of the right type."""
    chance = random.Random(32)
    left_out = {"config", "model", "host", "port", "uds", "hf-token", "api-key", "headless", "grpc"}
    specs = [spec for spec in release_table("0.32.0").flags.values() if spec.name not in left_out]
    return [{spec.name: any_value(spec, chance) for spec in chance.sample(specs, 8)} for _ in range(count)]


@pytest.fixture(scope="module")
def answers(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The real parser's results for all cases."""
    folder = tmp_path_factory.mktemp("configs")
    plans = [plan_of(flags) for flags in flag_sets(100)]
    plans += [plan_of({"chat-template": text, "served-model-name": text}) for text in NASTY]
    cases: list[Sequence[Sequence[str]]] = []
    for number, plan in enumerate(plans):
        file = folder / f"{number}.yaml"
        file.write_text(config_yaml(plan))
        extra = [f"--{name}={value}" for name, value in plan.flags.items() if str(value).startswith("-")]
        cases.append((list(plan.argv[1:]), ["serve", "--config", str(file), *extra]))
    cases += [[["serve", "m", *flag_words(flags)]] for flags in NAMED]
    for name, line in (("false", "enable-prefix-caching: false"), ("no", "no-enable-prefix-caching: true")):
        (folder / f"{name}.yaml").write_text(f"model: m\n{line}\n")
        cases.append([["serve", "--config", str(folder / f"{name}.yaml")]])
    printed = forks.run(["-c", PARSE], json.dumps(cases))
    *found, known = json.loads(printed.partition("=====")[2])
    named = [case[0] for case in found[len(plans) : -2]]
    return {
        "plans": plans,
        "pairs": found[: len(plans)],
        "named": named,
        "false": found[-2][0],
        "no": found[-1][0],
        "known": known,
    }


def test_config_file_matches_command_line(answers: dict[str, Any]) -> None:
    taken = 0
    for plan, (from_words, from_file) in zip(answers["plans"], answers["pairs"], strict=True):
        assert without_ids(from_file) == without_ids(from_words), plan.flags
        taken += isinstance(from_words, dict)
    assert taken > len(answers["plans"]) * 0.8


def without_ids(read: Any) -> Any:
    """The result without randomly generated identifiers."""
    return json.loads(re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", json.dumps(read)))


def test_false_in_config_file_disables_flag(answers: dict[str, Any]) -> None:
    """``x: false`` is dropped by ``vllm serve``, so it is written ``no-x: true``."""
    assert answers["no"]["enable_prefix_caching"] == "False"
    assert answers["false"]["enable_prefix_caching"] == "None"


@pytest.mark.parametrize("index", range(len(NAMED)), ids=lambda index: " ".join(NAMED[index]))
def test_name_is_rejected_like_in_vllm(index: int, answers: dict[str, Any]) -> None:
    found = flag_findings(NAMED[index], {}, EngineFacts(release_table("0.32.0"), (0, 32, 0)))
    refused = any(finding.level is Level.ERROR and finding.surely for finding in found)
    assert refused == (not isinstance(answers["named"][index], dict)), (found, answers["named"][index])


def test_release_table_matches_parser(answers: dict[str, Any]) -> None:
    """Names, choices and forms of all flags. Choices that depend on the device are not in the table."""
    table = release_table("0.32.0").flags
    assert set(table) == set(answers["known"])
    for name, real in answers["known"].items():
        spec = table[name]
        assert spec.negatable == real["negatable"], name
        assert set(spec.aliases) == set(real["aliases"]), name
        if spec.choices and spec.kind is not ValueKind.OTHER:
            assert set(spec.choices) == set(real["choices"]), name
        else:
            assert not real["choices"] or spec.kind is ValueKind.OTHER or name == "mm-processor-device"
