"""A vLLM plugin for tests and benchmarks under load: an engine step takes at least ``PACED_STEP_SECONDS``, plus
``PACED_TOKEN_SECONDS`` for each token that it computes (0 by default).

The tiny model's steps take a few milliseconds, so a loaded engine and the process that streams its tokens use the whole
machine. With the pace of a typical model they use a fraction of it and behave alike.
"""

import functools
import os
import time


def pace():
    """Called by vLLM in each of its processes, before an engine is created."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, update = Scheduler.schedule, Scheduler.update_from_output
    if hasattr(schedule, "paced"):
        return
    per_step = float(os.environ["PACED_STEP_SECONDS"])
    per_token = float(os.environ.get("PACED_TOKEN_SECONDS", "0"))

    @functools.wraps(schedule)
    def paced(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        tokens = output.total_num_scheduled_tokens
        output.paced_end = time.monotonic() + per_step + per_token * tokens if tokens else 0.0
        return output

    @functools.wraps(update)
    def updated(self, scheduler_output, *args, **kwargs):
        # Before vLLM takes the timestamps of the step's results.
        time.sleep(max(0.0, scheduler_output.paced_end - time.monotonic()))
        return update(self, scheduler_output, *args, **kwargs)

    paced.paced = True
    Scheduler.schedule, Scheduler.update_from_output = paced, updated
