"""An installed vLLM: versions, flags, model facts, reports of its starts."""
