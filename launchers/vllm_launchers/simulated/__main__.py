"""``python -m vllm_launchers.simulated serve MODEL [flags]``: vLLM's server without a GPU.

The environment says what is simulated: ``SIMULATED_GPU`` (a name from ``hardware.GPUS``, by default an RTX A6000),
``SIMULATED_STARTUP_SECONDS`` (4 by default, 0 for tests) and ``SIMULATED_SPEED`` (2 halves every iteration's time).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> int:
    """Start the server and serve until it is told to stop; the exit codes are vLLM's."""
    from vllm_launchers.simulated.flags import parse

    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        return _serve(args)
    except KeyboardInterrupt:
        _die_of(signal.SIGINT)


def _serve(args: argparse.Namespace) -> int:
    import asyncio
    import gc

    from vllm_launchers.simulated.log import Log
    from vllm_launchers.simulated.server import bind, run
    from vllm_launchers.simulated.settings import Simulated, resolve
    from vllm_launchers.simulated.startup import Startup, announce

    log = Log()
    simulated = Simulated.from_environment(os.environ)
    announce(log, args, simulated.gpu.name)
    sock = bind(args.host, args.port)
    settings = resolve(args, simulated)
    plan = Startup(log, settings, simulated.startup_seconds).run()
    gc.freeze()  # what is loaded by now stays: later collections need not look at it
    asyncio.run(run(args, settings, plan, simulated.speed, sock, log))
    return 0


def _die_of(number: signal.Signals) -> NoReturn:
    """End by the signal itself, so that whoever waits sees how it ended."""
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
