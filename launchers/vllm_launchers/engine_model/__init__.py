"""vLLM's step times: GPU models, a model's shape, and a roofline over both. Pure."""
