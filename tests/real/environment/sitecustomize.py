"""Runs in every Python of the environment, before anything else.

vLLM's CPU platform has the engine's process spawned, whatever the environment says, and a spawned process imports vLLM
once more: half of what a start costs. A test whose server may as well be forked sets ``VLLM_WORKER_MULTIPROC_METHOD``
to ``fork``, and this keeps it.

Python's garbage collections, 1,700 during an import of vLLM, find next to nothing: a tenth of what a start computes.
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
