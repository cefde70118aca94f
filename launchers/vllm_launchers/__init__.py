"""Starts and supervises vLLM servers: presets, plans, the machine, the keeper, the simulated engine.

Nothing here imports ``vllm_console``. This file has no imports, because the keeper imports only the standard library.
"""
