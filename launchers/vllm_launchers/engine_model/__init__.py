"""vLLM's scheduler, iteration by iteration, and its step times from GPU models and a model's shape. Pure."""
