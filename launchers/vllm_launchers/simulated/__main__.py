"""``python -m vllm_launchers.simulated serve MODEL [flags]``: vLLM's server without a GPU.

Environment variables determine what is simulated: ``SIMULATED_GPU`` (a name in `engine_model.gpu_models`, default: RTX
A6000), ``SIMULATED_STARTUP_SECONDS`` (default: 4; 0 for tests), ``SIMULATED_SPEED`` (2 halves every iteration's time),
``SIMULATED_HOST_GIB`` (host memory for the weights of a sleeping server; default: enough) and ``SIMULATED_TOTALS`` (a
file with a body of ``/metrics`` from which to continue counting; the server is then up immediately).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> int:
    """Start the server and serve until stopped; exit codes are vLLM's."""
    from vllm_launchers.private import open_standard_streams
    from vllm_launchers.simulated.flags import parse_flags

    open_standard_streams()
    args = parse_flags(sys.argv[1:] if argv is None else argv)
    try:
        return serve(args)
    except KeyboardInterrupt:
        die_of(signal.SIGINT)


def serve(args: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit code."""
    import gc

    gc.disable()  # imports create almost no garbage, and collection would take an eighth of their time
    import asyncio

    from vllm_launchers.simulated.memory import plan_memory
    from vllm_launchers.simulated.server import bind, run
    from vllm_launchers.simulated.settings import Simulated, resolve_settings
    from vllm_launchers.simulated.startup import Log, SimulatedStartup, announce, announce_resumed

    log = Log()
    simulated = Simulated.from_environment(os.environ)
    if simulated.totals is None:
        announce(log, args, simulated.gpu.name)
    sock = bind(args.host, args.port)
    settings = resolve_settings(args, simulated)
    if simulated.totals is None:
        plan, totals = SimulatedStartup(log, settings, simulated.startup_seconds).run(), ""
    else:
        plan, totals = plan_memory(settings), simulated.totals.read_text()
        announce_resumed(log)
    gc.freeze()  # what has been loaded stays, so later collections can skip it
    gc.enable()
    asyncio.run(run(args, settings, plan, simulated.speed, sock, log, totals, simulated.host_bytes))
    return 0


def die_of(number: signal.Signals) -> NoReturn:
    """End by the signal itself, so that the parent sees the cause."""
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
