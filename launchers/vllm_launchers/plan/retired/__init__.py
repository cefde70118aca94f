"""What guides still say and vLLM no longer knows: flags, values and variables, since when, and the way out. Pure."""
