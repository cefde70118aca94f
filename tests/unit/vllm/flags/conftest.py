"""Fake packages that register flags like vLLM's releases, in environments that appear installed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind

Files = Mapping[str, str]

FILLERS = 30
"""Additional flags, because the few that a test needs would not be recognized as vLLM's."""

UTILS = """
    from pydantic import ConfigDict
    from pydantic.dataclasses import dataclass

    def config(cls=None, *, config=None, **kwargs):
        merged = ConfigDict(extra="forbid")
        return dataclass(cls, config=merged, **kwargs)

    def get_field(cls, name):
        ...
"""

KWARGS = """
    def _compute_kwargs(cls):
        kwargs = {}
        for field in fields(cls):
            name = field.name
            human_ints = {"max_num_batched_tokens", "cache_bytes"}
            if contains_type(hints, int):
                if name == "max_model_len":
                    kwargs[name]["type"] = human_readable_int_or_auto
                elif name in human_ints:
                    kwargs[name]["type"] = human_readable_int
        return kwargs

    def get_kwargs(cls):
        return copy.deepcopy(_compute_kwargs(cls))
"""

ENVIRONMENT = """
    import os

    environment_variables = {
        "VLLM_LOGGING_LEVEL": lambda: os.getenv("VLLM_LOGGING_LEVEL", "INFO"),
        "VLLM_MADE_UP": lambda: bool(int(os.getenv("VLLM_MADE_UP", "0"))),
        "CUDA_HOME": lambda: os.environ.get("CUDA_HOME"),
    }
"""


def write_package(folder: Path, files: Files) -> Path:
    """Write modules by path, with an ``__init__.py`` in every folder; returns the package's folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    for place in {folder, *(path.parent for path in folder.rglob("*.py"))}:
        if not (place / "__init__.py").exists():
            (place / "__init__.py").write_text("")
    return folder


def filler_fields() -> str:
    """`FILLERS` fields of a configuration class."""
    return "".join(f'\n        filler_{number}: bool = False\n        """Nothing."""' for number in range(FILLERS))


ARG_UTILS = """
import argparse
import json
import sys
from vllm.config import FillerConfig, MadeConfig

class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        filler_group = parser.add_argument_group(title="FillerConfig", description=FillerConfig.__doc__)
        for key, value in get_kwargs(FillerConfig).items():
            filler_group.add_argument(f"--{key.replace('_', '-')}", **value)
REGISTRATION
        return parser

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

    @staticmethod
    def add_cli_args(parser, async_args_only=False):
        load_general_plugins()
        if not async_args_only:
            parser = EngineArgs.add_cli_args(parser)
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction,
                            default=AsyncEngineArgs.enable_log_requests, help="Log requests.")
        current_platform.pre_register_and_update(parser)
        return parser
"""


def modern(config: str, registration: str, more: Files | None = None) -> dict[str, str]:
    """A package in the style of recent releases, with the given code under test.

    ``config`` are lines of ``vllm/config/made.py``; ``registration`` are lines of ``EngineArgs.add_cli_args``, which
    can use ``parser``.
    """
    lines = textwrap.indent(textwrap.dedent(registration), " " * 8)
    return {
        "config/utils.py": UTILS,
        "config/filler.py": f"""
    from vllm.config.utils import config

    @config
    class FillerConfig:{filler_fields()}
    """,
        "config/made.py": "from vllm.config.utils import config, get_field\nfrom pydantic import Field\n"
        "from dataclasses import field\nfrom typing import Any, Annotated, ClassVar, Literal\n"
        + textwrap.dedent(config),
        "config/__init__.py": "from vllm.config.filler import FillerConfig\nfrom .made import MadeConfig\n",
        "envs.py": ENVIRONMENT,
        "engine/arg_utils.py": textwrap.dedent(KWARGS) + ARG_UTILS.replace("REGISTRATION", lines),
        "entrypoints/openai/cli_args.py": """
    from vllm.engine.arg_utils import AsyncEngineArgs

    def make_arg_parser(parser):
        parser.add_argument("model_tag", type=str, nargs="?", help="The model.")
        parser.add_argument("--headless", action="store_true", default=False, help="No server.")
        return AsyncEngineArgs.add_cli_args(parser)
    """,
        **(more or {}),
    }


@pytest.fixture
def make_package(tmp_path: Path) -> Callable[..., Path]:
    """Write a package in recent style: ``make_package(config, registration)`` returns its folder."""

    def make(config: str, registration: str, more: Files | None = None) -> Path:
        return write_package(tmp_path / "source" / "vllm", modern(config, registration, more))

    return make


@pytest.fixture
def write_files() -> Callable[[Path, Files], Path]:
    return write_package


MADE_CONFIG = """
    @config
    class MadeConfig:
        speed: int = 3
        \"\"\"How fast.\"\"\"
"""
MADE_FLAGS = """
    made_kwargs = get_kwargs(MadeConfig)
    made_group = parser.add_argument_group(title="MadeConfig", description=MadeConfig.__doc__)
    made_group.add_argument("--speed", "-s", **made_kwargs["speed"])
"""


class FakeEnvironment:
    """A virtual environment that consists only of files: ``bin``, ``site-packages``, vLLM's metadata and package."""

    def __init__(self, root: Path, version: str = "0.32.0+cpu") -> None:
        self.root, self.version = root, version
        self.site = root / "lib/python3.11/site-packages"
        self.site.mkdir(parents=True)
        (root / "bin").mkdir()
        (root / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.9\n")
        self.python = root / "bin/python3"
        self.python.write_text("")
        self.python.chmod(0o755)
        self.command = self.script(f"#!{self.python}\nfrom vllm.entrypoints.cli.main import main\nmain()\n")
        (self.site / f"vllm-{version}.dist-info").mkdir()

    def script(self, text: str, name: str = "vllm") -> Path:
        """Write a command in ``bin``."""
        path = self.root / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def install(self, files: Files | None = None) -> Path:
        """Write the package; returns its folder."""
        return write_package(self.site / "vllm", files or modern(MADE_CONFIG, MADE_FLAGS))

    def engine(self, *command: str) -> Engine:
        """The environment's engine, as it would be found."""
        words = command or (str(self.command),)
        return Engine(EngineKind.VLLM, words, self.version, "cpu", words[0])


@pytest.fixture
def environment(tmp_path: Path) -> FakeEnvironment:
    """An environment without the package."""
    return FakeEnvironment(tmp_path / "venv")


@pytest.fixture
def made_files() -> dict[str, str]:
    """A small package of recent style."""
    return modern(MADE_CONFIG, MADE_FLAGS)


def _table(*specs: FlagSpec, version: str = "0.32.0") -> FlagTable:
    return FlagTable(version, "installation", {spec.name: spec for spec in specs})


@pytest.fixture
def make_table() -> Callable[..., FlagTable]:
    return _table


@pytest.fixture
def table() -> FlagTable:
    kind = ValueKind
    return _table(
        FlagSpec("max-num-seqs", kind.INT, minimum=1, group="SchedulerConfig", help="Requests at a time."),
        FlagSpec("max-num-batched-tokens", kind.HUMAN_INT, minimum=1, group="SchedulerConfig"),
        FlagSpec("max-model-len", kind.HUMAN_INT, minimum=-1, words=("auto", "-1"), group="ModelConfig"),
        FlagSpec("seed", kind.INT, "0"),
        FlagSpec("gpu-memory-utilization", kind.FLOAT, "0.92", above=0, maximum=1,
                 aliases=("--device-memory-utilization",)),
        FlagSpec("watermark", kind.FLOAT, "0.0", minimum=0, below=1),
        FlagSpec("enforce-eager", kind.BOOL, "false", negatable=True, help="Without CUDA graphs."),
        FlagSpec("enable-prefix-caching", kind.BOOL, negatable=True, opposite="disable-prefix-caching",
                 help="Share the KV cache of equal beginnings."),
        FlagSpec("prefix-caching-hash-algo", kind.TEXT, "sha256", choices=("sha256", "xxhash")),
        FlagSpec("headless", kind.BOOL, "false"),
        FlagSpec("kv-cache-dtype", kind.TEXT, "auto", choices=("auto", "fp8", "fp8_e4m3")),
        FlagSpec("max-lora-rank", kind.INT, "16", choices=("8", "16", "32"), group="LoRAConfig"),
        FlagSpec("max-loras", kind.INT, "1", minimum=1, group="LoRAConfig"),
        FlagSpec("max-cpu-loras", kind.INT, nullable=True, group="LoRAConfig"),
        FlagSpec("enable-lora", kind.BOOL, negatable=True, group="LoRAConfig"),
        FlagSpec("attention-backend", kind.TEXT, nullable=True, words=("FLASH_ATTN", "FLASHINFER"), closed=True),
        FlagSpec("moe-backend", kind.OTHER, "auto", choices=("auto", "deep_gemm")),
        FlagSpec("load-format", kind.TEXT, "auto", words=("auto", "dummy")),
        FlagSpec("compilation-config", kind.JSON, aliases=("-cc",),
                 parts=(FlagSpec("mode", kind.OTHER), FlagSpec("cudagraph_capture_sizes", kind.OTHER))),
        FlagSpec("hf-overrides", kind.JSON, "{}"),
        FlagSpec("speculative-config", kind.JSON, nullable=True),
        FlagSpec("allowed-origins", kind.JSON_LIST, "[]", group="Frontend"),
        FlagSpec("additional-config", kind.OTHER, "{}"),
        FlagSpec("cudagraph-capture-sizes", kind.INT, many=True, nullable=True, group="CompilationConfig"),
        FlagSpec("served-model-name", kind.TEXT, many=True, nullable=True, group="ModelConfig"),
        FlagSpec("hf-token", kind.TEXT, bare=True),
        FlagSpec("tensor-parallel-size", kind.INT, "1", minimum=1, aliases=("-tp",), group="ParallelConfig"),
    )  # fmt: skip
