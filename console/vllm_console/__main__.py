"""Lets `python -m vllm_console` do what the `vllm-console` command does."""

import sys

from vllm_console.cli.main import main

sys.exit(main())
