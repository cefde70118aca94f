"""Runs the ``vllm-console`` command as ``python -m vllm_console``."""

import sys

from vllm_console.cli.main import main

sys.exit(main())
