"""A keeper's program: ``python -I -S __main__.py FOLDER LOCK_FD``, or ``--prepare SOCKET_FD`` (`loop`).

It runs as a file and without ``site``, so that it starts fast, stays small and does not depend on anything that could
change underneath it. Python recompiles the file it runs at each start; everything else is in modules, whose bytecode is
cached.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from vllm_launchers.keeper import loop, prepared_launch

if __name__ == "__main__":
    if sys.argv[1] == prepared_launch.PREPARE:
        loop.prepare(int(sys.argv[2]))
    else:
        loop.main(Path(sys.argv[1]), int(sys.argv[2]))
