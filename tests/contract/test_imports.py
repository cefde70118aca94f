"""Who may import whom: the static graph by import-linter, and what each room really loads in a process of its own.

A static graph does not see imports made by name or at run time; the list of loaded modules does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCREEN = {"textual", "rich"}
WEB = {"httpx", "starlette", "uvicorn"}
CONSOLE = {"vllm_console"}

ROOMS = {
    "vllm_launchers.presets": SCREEN | WEB | CONSOLE | {"psutil", "pynvml"},
    "vllm_launchers.machine": SCREEN | WEB | CONSOLE,
    "vllm_launchers.plan": SCREEN | WEB | CONSOLE | {"psutil", "pynvml"},
    "vllm_launchers.keeper": SCREEN | WEB | CONSOLE,
    "vllm_launchers.simulated": SCREEN | CONSOLE,
    "vllm_console.telemetry": SCREEN | WEB,
    "vllm_console.logs": SCREEN | WEB,
    "vllm_console.diagnosis": SCREEN | WEB | {"asyncio"},
    "vllm_console.load": {"textual", "starlette", "uvicorn"},  # httpx loads rich, where it is installed
    "vllm_console.fleet": SCREEN | WEB,
    "vllm_console.alerts": SCREEN | WEB | {"asyncio"},
    "vllm_console.ui": WEB,
}
"""Each room, whole, and what must not be loaded with it."""

FOUNDATION = {f"vllm_launchers.{name}" for name in ("addresses", "private", "procfs", "secrets")}
"""What stands below all rooms and needs the standard library only."""

LOAD_A_ROOM = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
room = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(room, "__path__", []), room.__name__ + "."):
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
    """Run code in a fresh interpreter; what it prints, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout)
    return answer


def modules_of(room: str) -> set[str]:
    """Everything that importing a room, whole, loads."""
    return {str(name) for name in python(LOAD_A_ROOM, room)}


def tops(modules: set[str]) -> set[str]:
    """Top-level names."""
    return {name.partition(".")[0] for name in modules}


def test_the_import_graph_keeps_its_contracts() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_loads_nothing_that_it_must_not(room: str) -> None:
    loaded = tops(modules_of(room))
    assert room.partition(".")[0] in loaded
    assert loaded & (ROOMS[room] | {"vllm"}) == set()


def test_every_room_is_looked_at() -> None:
    sources = [ROOT / "console/vllm_console", ROOT / "launchers/vllm_launchers"]
    rooms = {f"{source.name}.{path.parent.name}" for source in sources for path in source.glob("*/__init__.py")}
    assert rooms == {*ROOMS, "vllm_console.cli"}


def test_the_keeper_loads_the_standard_library_and_itself_only() -> None:
    modules = modules_of("vllm_launchers.keeper")
    assert tops(modules) <= {*sys.stdlib_module_names, "vllm_launchers"}
    others = {name for name in modules if name.startswith("vllm_launchers.")}
    assert {name for name in others if not name.startswith("vllm_launchers.keeper")} <= FOUNDATION


def test_the_recorder_stays_small() -> None:
    loaded = tops(modules_of("vllm_console.telemetry.recorder"))
    assert loaded & (SCREEN | WEB | {"asyncio", "prometheus_client", "psutil"}) == set()


def test_the_command_line_itself_is_light() -> None:
    loaded = tops(modules_of("vllm_console.cli.main"))
    assert loaded & (SCREEN | WEB | {"asyncio", "msgspec", "psutil", "pynvml"}) == set()


def test_a_command_that_only_looks_loads_no_screen_and_no_http_client(tmp_path: Path) -> None:
    code, modules = python(RUN_A_COMMAND, "--state", str(tmp_path), "list", "--json")
    assert code == 0
    assert isinstance(modules, list)
    assert tops(set(modules)) & (SCREEN | WEB | {"asyncio"}) == set()
