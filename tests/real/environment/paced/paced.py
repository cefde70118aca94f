"""A vLLM plugin for tests under load: a step of the engine takes at least ``PACED_STEP_SECONDS``.

The tiny model's steps take a few milliseconds, so that an engine under load, and the process that streams its tokens,
take all of a machine. With the pace of a model of usual size they take a fraction of it, and behave alike.
"""

import functools
import os
import time


def pace():
    """Called by vLLM in each of its processes, before an engine is made."""
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore.step, "paced", False):
        return
    step, seconds = EngineCore.step, float(os.environ["PACED_STEP_SECONDS"])

    @functools.wraps(step)
    def paced(self):
        since = time.monotonic()
        outputs, ran = step(self)
        if ran:
            time.sleep(max(0.0, since + seconds - time.monotonic()))
        return outputs, ran

    paced.paced = True
    EngineCore.step = paced
