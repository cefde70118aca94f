"""Add Ray to the environment that `build` makes: ``ray_layer.py [CACHE]``.

Prints one JSON line like ``build.py``, plus ``ray``. The layer is a virtual environment that links to the packages of
the other one, which is not changed, and adds Ray and a plugin that lets vLLM use Ray on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import build

PACKAGES = ("ray==2.60.0", "msgpack==1.2.4")
PLUGIN = build.HERE / "ray_on_cpu"
NEEDED_BYTES = 5 * 10**8


def layer(cache: Path) -> dict[str, str]:
    """The paths; builds the layer first unless this recipe was already built completely.

    Raises:
        UnavailableError: with the reason.
    """
    below = build.build(cache)
    key = hashlib.sha256(repr((PACKAGES, Path(__file__).read_bytes())).encode())
    for path in sorted(path for path in PLUGIN.rglob("*") if path.is_file() and path.parent.name != "__pycache__"):
        key.update(path.read_bytes())
    root = cache / "ray" / f"{build.recipe_key()}-{key.hexdigest()[:8]}"
    root.parent.mkdir(exist_ok=True)
    programs = root / "venv/bin"
    paths = {**below, **{name: str(programs / name) for name in ("vllm", "python", "ray")}}
    complete = root / "complete"
    with build.locked(root.with_suffix(".lock")):
        if not complete.exists():
            if (free := shutil.disk_usage(cache).free) < NEEDED_BYTES:
                raise build.UnavailableError(f"{cache} has {free / 1e9:.1f} GB free; Ray needs 0.5 GB")
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            _install(Path(below["python"]), root, root.with_suffix(".log"))
            complete.touch()
    return paths


def _install(below: Path, root: Path, log: Path) -> None:
    log.unlink(missing_ok=True)
    build.run([str(below), "-m", "venv", "--without-pip", str(root / "venv")], log, "a virtual environment")
    version = f"python{build.PYTHON[0]}.{build.PYTHON[1]}"
    packages = root / "venv/lib" / version / "site-packages"
    for path in (below.parent.parent / "lib" / version / "site-packages").iterdir():
        if path.name != "__pycache__":
            (packages / path.name).symlink_to(path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PLUGIN, packages, dirs_exist_ok=True, ignore=ignored)  # not linked: it outlives the checkout
    python = root / "venv/bin/python"
    pip = [str(below), "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    build.run([*pip, "--no-deps", *PACKAGES], log, "Ray")
    command = below.with_name("vllm").read_text(encoding="utf-8").replace(str(below), str(python))
    (root / "venv/bin/vllm").write_text(command, encoding="utf-8")
    (root / "venv/bin/vllm").chmod(0o755)


def main(arguments: Sequence[str]) -> int:
    """Build, and print the paths."""
    try:
        print(json.dumps(layer(Path(arguments[0]) if arguments else build.default_cache())))
    except (build.UnavailableError, OSError) as error:
        print(error, file=sys.stderr)
        return build.UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
