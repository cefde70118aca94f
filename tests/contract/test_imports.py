"""Which package may import what: import-linter checks the static graph, and a separate process shows what is actually
loaded.

The static graph does not contain dynamic imports; the list of loaded modules does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCREEN = {"textual", "rich"}
WEB = {"httpx", "starlette", "uvicorn", "aiohttp"}
CONSOLE = {"vllm_console"}

PACKAGES = {
    "vllm_launchers.presets": SCREEN | WEB | CONSOLE | {"psutil", "pynvml"},
    "vllm_launchers.host": SCREEN | WEB | CONSOLE,
    "vllm_launchers.vllm": SCREEN | WEB | CONSOLE,
    "vllm_launchers.plan": SCREEN | WEB | CONSOLE | {"psutil", "pynvml"},
    "vllm_launchers.launch": SCREEN | WEB | CONSOLE,
    "vllm_launchers.keeper": SCREEN | WEB | CONSOLE,
    "vllm_launchers.prepared": SCREEN | WEB | CONSOLE | {"psutil", "pynvml", "asyncio"},
    "vllm_launchers.simulated": SCREEN | CONSOLE,
    "vllm_launchers.engine_model": SCREEN | WEB | CONSOLE | {"psutil", "pynvml", "asyncio"},
    "vllm_launchers.probe": SCREEN | WEB | CONSOLE | {"psutil", "pynvml", "asyncio", "msgspec"},
    "vllm_console.metrics": SCREEN | WEB,
    "vllm_console.history": SCREEN | WEB,
    "vllm_console.prediction": SCREEN | WEB,
    "vllm_console.runs": SCREEN | WEB,
    "vllm_console.logs": SCREEN | WEB,
    "vllm_console.diagnosis": SCREEN | WEB | {"asyncio"},
    "vllm_console.chat": {"textual", "starlette", "uvicorn"},  # httpx loads rich if it is installed
    "vllm_console.load": {"textual", "starlette", "uvicorn"},  # httpx loads rich if it is installed
    "vllm_console.fleet": SCREEN | WEB,
    "vllm_console.alerts": SCREEN | WEB | {"asyncio"},
    "vllm_console.ui": WEB,
    "vllm_console.web": {"textual", "httpx", "starlette", "uvicorn"},
}
"""Packages, and what importing any of their modules must not load."""

FOUNDATION = {
    f"vllm_launchers.{name}"
    for name in (
        *(
            "addresses",
            "errors",
            "http_connection",
            "listeners",
            "patterns",
            "private",
            "probe",
            "probe.environment",
            "procfs",
            "secrets",
        ),
        *("units", "values"),
    )
}
"""The lowest layer, which only needs the standard library."""

LOAD_A_PACKAGE = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""

RUN_A_COMMAND = """
import contextlib, io, json, sys
before = set(sys.modules)
from vllm_console.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
print(json.dumps([code, sorted(set(sys.modules) - before)]))
"""


def python(code: str, *words: str) -> list[object]:
    """Run code in a fresh interpreter; returns its output parsed as JSON."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout)
    return answer


def modules_of(package: str) -> set[str]:
    """Everything that importing all modules of a package loads."""
    return {str(name) for name in python(LOAD_A_PACKAGE, package)}


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_import_graph_keeps_its_contracts() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_package_loads_no_forbidden_module(package: str) -> None:
    loaded = tops(modules_of(package))
    assert package.partition(".")[0] in loaded
    assert loaded & (PACKAGES[package] | {"vllm"}) == set()


def test_every_package_is_checked() -> None:
    sources = [ROOT / "console/vllm_console", ROOT / "launchers/vllm_launchers"]
    packages = {f"{source.name}.{path.parent.name}" for source in sources for path in source.glob("*/__init__.py")}
    assert packages == {*PACKAGES, "vllm_console.cli"}


def test_keeper_loads_only_the_standard_library_and_itself() -> None:
    modules = modules_of("vllm_launchers.keeper")
    assert tops(modules) <= {*sys.stdlib_module_names, "vllm_launchers"}
    others = {name for name in modules if name.startswith("vllm_launchers.")}
    assert {name for name in others if not name.startswith("vllm_launchers.keeper")} <= FOUNDATION


def test_keeper_starts_without_what_only_its_starter_needs() -> None:
    assert tops(modules_of("vllm_launchers.keeper.loop")) & {"asyncio", "dataclasses", "locale", "subprocess"} == set()


def test_recorder_stays_small() -> None:
    modules = modules_of("vllm_console.recorder")
    loaded = tops(modules)
    assert loaded & (SCREEN | WEB | {"asyncio", "prometheus_client", "psutil", "statistics"}) == set()
    keepers = {name for name in modules if name.startswith("vllm_launchers.keeper.")}
    assert keepers == {"vllm_launchers.keeper.files"}, "only the names of files"


def test_command_line_loads_little() -> None:
    loaded = tops(modules_of("vllm_console.cli.main"))
    assert loaded & (SCREEN | WEB | {"asyncio", "msgspec", "psutil", "pynvml"}) == set()


@pytest.mark.parametrize("module", ["fleet.gpus", "fleet.local", "ui.app"])
def test_console_opens_before_gpu_libraries_are_loaded(module: str) -> None:
    """Its libraries take 30 ms; a thread loads them if there is a driver."""
    assert tops(modules_of(f"vllm_console.{module}")) & {"psutil", "pynvml"} == set()


def test_read_only_command_loads_no_screen_or_http_client(tmp_path: Path) -> None:
    code, modules = python(RUN_A_COMMAND, "--state", str(tmp_path), "list", "--json")
    assert code == 0
    assert isinstance(modules, list)
    loaded = tops(set(modules))
    assert loaded & (SCREEN | WEB | {"asyncio"}) == set()
    # Each costs Python a millisecond or more, for example because it generates code for every dataclass.
    assert loaded & {"dataclasses", "difflib", "shutil", "subprocess"} == set()
