"""Environment variables that add the probe to a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PLUGIN = Path(__file__).parent / "plugin"
NAME = "vllm_console_probe"
"""Name of the entry point."""
PROBE = "probe"
"""Name of the records' folder, within a server's folder."""
FOLDER = "VLLMCONSOLE_PROBE"
"""The variable that names that folder; repeats the plugin's, so that the keeper need not load the plugin."""
SEARCHED, CHOSEN = "PYTHONPATH", "VLLM_PLUGINS"


def probe_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a server with this environment find the plugin; existing values are kept.

    ``VLLM_PLUGINS`` is extended only if it is set: if unset, vLLM loads all plugins; if set, only those that it names.
    """
    folders = [folder for folder in environment.get(SEARCHED, "").split(os.pathsep) if folder]
    variables = {SEARCHED: os.pathsep.join(dict.fromkeys([str(PLUGIN), *folders]))}
    if CHOSEN in environment:
        names = [name for name in environment[CHOSEN].split(",") if name]
        variables[CHOSEN] = ",".join(dict.fromkeys([*names, NAME]))
    return variables


def with_probe(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """A server's environment with the probe, which records into the server's ``folder``."""
    return {**environment, **probe_variables(environment), FOLDER: str(folder / PROBE)}
