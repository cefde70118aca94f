"""Learns the flags of an installed vLLM from its source. Nothing is run or imported, and no dependency is needed.

Configuration classes, ``add_cli_args`` and ``make_arg_parser`` are parsed, and followed where they register flags.
Takes well under a second of CPU time; `cache` keeps the result.
"""

from __future__ import annotations

import ast
import gc
from pathlib import Path

from msgspec.structs import replace

from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.evaluate import Evaluator
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagsUnknownError, FlagTable
from vllm_launchers.vllm.flags.limits import limits
from vllm_launchers.vllm.flags.package import Module, Package, Symbol
from vllm_launchers.vllm.flags.source_location import package_folder, package_version
from vllm_launchers.vllm.flags.spec import ArgumentGroup, Registration, flag_spec
from vllm_launchers.vllm.flags.variables import reads_all, variable_specs

PARSERS = (
    "vllm.entrypoints.common.cli_args",  # since 0.33
    "vllm.entrypoints.launchers.cli_args",  # since 0.28
    "vllm.entrypoints.openai.cli_args",
)
"""Modules that have contained ``make_arg_parser``, newest first."""

_DEVICES = {"cuda": "cuda", "rocm": "cuda", "cpu": "cpu", "xpu": "xpu", "tpu": "tpu"}
"""A build's PyTorch device. AMD GPUs are ``cuda`` too."""

_PARSER_NAMES = {
    "tool-call-parser": ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning-parser": ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Flags whose value is a name in a registry: the module, and its dictionary of names (since 0.12)."""

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"

_FEWEST = 20
"""If fewer flags are found, the source was not understood."""


def learn_flags(engine: Engine) -> FlagTable:
    """All flags of an installation's ``vllm serve``.

    Raises:
        FlagsUnknownError: its files cannot be found, read or understood; the text is one sentence.
    """
    folder = package_folder(engine)
    return learn_folder(folder, version=engine.version or package_version(folder), build=engine.build)


def learn_folder(folder: Path, *, version: str | None = None, build: str | None = None) -> FlagTable:
    """Like `learn_flags`, for a folder with vLLM's source: the package itself, with ``engine/arg_utils.py`` in it.

    Raises:
        FlagsUnknownError: as for `learn_flags`.
    """
    collecting = gc.isenabled()
    gc.disable()  # parsing creates 100,000 small nodes and no garbage
    try:
        return _learn(folder, version, build)
    except (OSError, RecursionError) as error:
        raise FlagsUnknownError(f"{folder}: vLLM's source can't be read: {error}") from error
    finally:
        if collecting:
            gc.enable()


def _learn(folder: Path, version: str | None, build: str | None) -> FlagTable:
    package = Package(folder)
    module = next((found for name in PARSERS if _makes_parser(found := package.module(name))), None)
    if module is None:
        raise FlagsUnknownError(f"{folder}: its source has no make_arg_parser where vLLM 0.10 to 0.33 have it")
    facts: dict[str, object] = {}
    if device := _DEVICES.get(build or ""):
        facts["vllm.platforms.current_platform.device_type"] = device
    evaluator = Evaluator(package, facts)
    registration = Registration(evaluator)
    registration.follow(
        Symbol(f"{module.name}.make_arg_parser", module, module.names["make_arg_parser"]), [ArgumentGroup()]
    )
    flags: dict[str, FlagSpec] = {}
    for registered in registration.found:
        if (spec := flag_spec(evaluator, registered)) is not None:
            flags.setdefault(spec.name, spec)
    if len(flags) < _FEWEST:
        raise FlagsUnknownError(f"{folder}: only {len(flags)} flags were found in its source, which was not understood")
    _add_parser_names(evaluator, flags)
    _add_connectors(package, flags)
    _add_opposites(package, flags)
    envs = package.module("vllm.envs")
    values, all_read = ({}, False) if envs is None else (variable_specs(envs), reads_all(envs))
    return FlagTable(version, "installation", flags, _variables(package), values, all_read, limits(package))


def _makes_parser(module: Module | None) -> bool:
    return module is not None and isinstance(module.names.get("make_arg_parser"), ast.FunctionDef)


def _add_parser_names(evaluator: Evaluator, flags: dict[str, FlagSpec]) -> None:
    for flag, (name, registry) in _PARSER_NAMES.items():
        module = evaluator.package.module(name)
        node = module.names.get(registry) if module is not None else None
        if flag in flags and isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            flags[flag] = replace(flags[flag], words=tuple(sorted(key for key in keys if isinstance(key, str))))


def _add_connectors(package: Package, flags: dict[str, FlagSpec]) -> None:
    """Suggest the known connectors for ``kv_connector``; plugins may add others."""
    module, spec = package.module(_CONNECTORS), flags.get("kv-transfer-config")
    if module is None or spec is None:
        return
    names = tuple(
        call.args[0].value
        for call in module.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "register_connector"
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    )
    parts = (replace(part, words=names) if part.name == "kv_connector" else part for part in spec.parts)
    flags[spec.name] = replace(spec, parts=tuple(parts))


def _add_opposites(package: Package, flags: dict[str, FlagSpec]) -> None:
    """Add the opposite option: since 0.33 ``--enable-x`` has ``--disable-x``, and vice versa."""
    module = package.module("vllm.utils.argparse_utils")
    if module is None or "EnableDisableAction" not in module.names:
        return
    for name, spec in list(flags.items()):
        prefix, _, rest = name.partition("-")
        other = {"enable": "disable", "disable": "enable"}.get(prefix)
        if other and spec.negatable:
            flags[name] = replace(spec, opposite=f"{other}-{rest}")


def _variables(package: Package) -> frozenset[str]:
    module = package.module("vllm.envs")
    if module is None:
        return frozenset()
    table = module.names.get("environment_variables")
    if not isinstance(table, (ast.Assign, ast.AnnAssign)) or table.value is None:
        return frozenset()
    names = {
        key.value
        for node in ast.walk(table.value)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return frozenset(name for name in names if name.startswith("VLLM_"))
