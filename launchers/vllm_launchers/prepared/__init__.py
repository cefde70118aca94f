"""Starts vLLM in two steps, of which the first needs no GPU and no port."""
