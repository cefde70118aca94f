"""Runs first in every Python of the environment.

vLLM's CPU platform spawns the engine's process regardless of the environment, and a spawned process imports vLLM again,
which is half of the startup time. Tests whose servers may be forked set ``VLLM_WORKER_MULTIPROC_METHOD`` to ``fork``;
this file keeps vLLM from changing it.

During an import of vLLM, Python runs 1,700 garbage collections that find next to nothing: a tenth of the CPU time of a
start. A higher threshold avoids them.
"""

import gc
import os

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

gc.set_threshold(50_000, 20, 20)

if os.environ.get(METHOD) == "fork":
    _set = os._Environ.__setitem__

    def _keep(environment, name, value):
        if (name, value) != (METHOD, "spawn"):
            _set(environment, name, value)

    os._Environ.__setitem__ = _keep
