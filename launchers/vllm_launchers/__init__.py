"""Starts and supervises vLLM servers: presets, plans, the machine, the keeper, the simulated engine.

Nothing here imports ``vllm_console``, and the keeper imports nothing but the standard library, so this file
stays empty of imports.
"""
