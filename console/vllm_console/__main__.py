"""The program: the ``vllm-console`` command, and ``python -m vllm_console``."""

import sys


def run() -> int:
    """Import the command line and run it; returns the exit code. Ctrl+c during the import ends it quietly, too."""
    try:
        from vllm_console.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
