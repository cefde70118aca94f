"""``python -m vllm_launchers.simulated.prepared serve MODEL [flags]``: the simulated engine, started in two steps.

It uses the protocol of `vllm_launchers.prepared.bootstrap`: it checks its flags, waits, and serves when asked.
"""

from __future__ import annotations

import os
import signal
import sys

from vllm_launchers.prepared.bootstrap import (
    REFUSED,
    KeeperSocket,
    die_with_parent,
    noted_exits,
    noted_start,
    shortened,
    take_output,
)


def main() -> int:
    """Prepare, wait, then serve."""
    start = noted_start()
    keeper = KeeperSocket(start)
    keeper.report("importing")
    from vllm_launchers.private import open_standard_streams
    from vllm_launchers.simulated.__main__ import die_of, serve
    from vllm_launchers.simulated.flags import parse_flags
    from vllm_launchers.simulated.settings import Simulated, resolve_settings

    open_standard_streams()
    keeper.report("imported", seconds=keeper.seconds)
    try:
        with noted_exits() as messages:
            args = parse_flags(sys.argv[1:])
        resolve_settings(args, Simulated.from_environment(os.environ))
    except SystemExit:
        keeper.report("refused", seconds=keeper.seconds, message=shortened("".join(messages).strip()))
        return REFUSED
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        keeper.report("refused", seconds=keeper.seconds, message=shortened(str(error)))
        return REFUSED
    keeper.report("judged", seconds=keeper.seconds, config_checked=True)
    print(f"prepared in {keeper.seconds:g} s")
    keeper.report("accepted", seconds=keeper.seconds)
    take_output(keeper.wait())
    die_with_parent(yes=False)
    keeper.report("started")
    keeper.close()
    try:
        return serve(args)
    except KeyboardInterrupt:
        die_of(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
