"""The variables that add the probe to a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PLUGIN = Path(__file__).parent / "plugin"
NAME = "vllm_console_probe"
"""The name of the entry point."""
PROBE = "probe"
"""The folder of the records, in a server's folder."""
FOLDER = "VLLMCONSOLE_PROBE"
"""The variable that names it, as in the plugin, which the keeper need not load."""
SEARCHED, CHOSEN = "PYTHONPATH", "VLLM_PLUGINS"


def probe_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What lets a server with this environment find the plugin. What it has there already stays.

    ``VLLM_PLUGINS`` is extended only where it is set: unset, vLLM loads all plugins; set, only those that it names.
    """
    folders = [folder for folder in environment.get(SEARCHED, "").split(os.pathsep) if folder]
    variables = {SEARCHED: os.pathsep.join(dict.fromkeys([str(PLUGIN), *folders]))}
    if CHOSEN in environment:
        names = [name for name in environment[CHOSEN].split(",") if name]
        variables[CHOSEN] = ",".join(dict.fromkeys([*names, NAME]))
    return variables


def with_probe(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """A server's environment with the probe, which records in its ``folder``."""
    return {**environment, **probe_variables(environment), FOLDER: str(folder / PROBE)}
