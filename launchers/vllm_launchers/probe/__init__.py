"""The probe: a plugin for vLLM that records each engine step and each finished request, without any text."""
