"""The hardware that an installed vLLM supports, read from its files: nothing is run or imported.

Three facts: the compute capability that each quantization method requires (``get_min_capability``), the GPU
architectures that its PyTorch was compiled for, and the block sizes that the CPU's attention accepts. Each is left out
if the source does not state it plainly.
"""

from __future__ import annotations

import ast
import mmap
from collections.abc import Iterator
from pathlib import Path

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.flags.flag_table import Limits
from vllm_launchers.vllm.flags.package import Module, Package, Symbol

FP8_COMPRESSED = "compressed-tensors fp8"
"""FP8 checkpoints of compressed-tensors, whose scheme for FP8 weights requires newer GPUs than the method itself."""

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_SCHEME = f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a16_fp8"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_FLAGS = lazy_pattern(rb"\0((?:sm|compute)_\d{2,3}[af]?(?: (?:sm|compute)_\d{2,3}[af]?)*)\0")
"""The list that ``torch.cuda.get_arch_list`` returns, as stored in ``libtorch_python.so``."""
_MOST_BYTES = 400_000_000


def limits(package: Package) -> Limits:
    """The known limits of an installation; ``package`` is vLLM's."""
    capabilities = dict(_capabilities(package))
    if (scheme := package.module(_SCHEME)) is not None:
        for name, node in scheme.names.items():
            if isinstance(node, ast.ClassDef) and (least := _least(package, Symbol(name, scheme, node))) is not None:
                capabilities[FP8_COMPRESSED] = least
    return Limits(capabilities, torch_architectures(package.folder.parent), _cpu_blocks(package))


def torch_architectures(site_packages: Path) -> tuple[str, ...]:
    """GPU architectures (``sm_75``) that the PyTorch installed with vLLM has code for; empty for none or a CPU build.

    PyTorch is not imported. Searching its 30 MiB library for the list takes some hundredths of a second.
    """
    path = site_packages / "torch/lib/libtorch_python.so"
    try:
        with path.open("rb") as file:
            if not 0 < path.stat().st_size < _MOST_BYTES:
                return ()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = max((match[1] for match in _FLAGS.finditer(data)), key=len, default=b"")
    except (OSError, ValueError):
        return ()
    return tuple(found.decode().split())


def _capabilities(package: Package) -> Iterator[tuple[str, int]]:
    """Yield quantization methods, as named in ``get_quantization_config``, and the capability that each requires."""
    module = package.module(_QUANTIZATION)
    function = module.names.get("get_quantization_config") if module is not None else None
    if module is None or not isinstance(function, ast.FunctionDef):
        return
    places: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom):
            where = f"{_QUANTIZATION}.{node.module}" if node.level == 1 else node.module or ""
            places.update((alias.asname or alias.name, where) for alias in node.names)
    for node in ast.walk(function):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Name):
                symbol = _class(package, places.get(value.id, ""), value.id)
                if symbol is not None and (least := _least(package, symbol)) is not None:
                    yield key.value, least


def _class(package: Package, place: str, name: str) -> Symbol | None:
    module = package.module(place)
    found = package.find(module, name) if module is not None else None
    return found if found is not None and isinstance(found.node, ast.ClassDef) else None


def _least(package: Package, symbol: Symbol) -> int | None:
    """The constant that a class's own or inherited ``get_min_capability`` returns; None if it is not a constant."""
    for base in package.bases(symbol):
        if not isinstance(base.node, ast.ClassDef):
            continue
        for statement in base.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "get_min_capability":
                return _number(statement)
    return None


def _number(function: ast.FunctionDef) -> int | None:
    """The whole number that a function returns, if that is its only return value."""
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returned) == 1 and isinstance(returned[0], ast.Constant) and isinstance(returned[0].value, int):
        return returned[0].value
    return None


def _cpu_blocks(package: Package) -> int | None:
    """The unit of CPU block sizes; None if the source does not state it."""
    module = package.module(_CPU_ATTENTION)
    for function in _methods(module, "get_supported_kernel_block_sizes"):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MultipleOf" and len(node.args) == 1:
                size = node.args[0]
                if isinstance(size, ast.Constant) and isinstance(size.value, int) and size.value > 0:
                    return size.value
    return None


def _methods(module: Module | None, name: str) -> Iterator[ast.FunctionDef]:
    for node in module.names.values() if module is not None else ():
        if isinstance(node, ast.ClassDef):
            yield from (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == name)
