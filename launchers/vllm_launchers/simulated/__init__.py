"""An engine without a GPU: vLLM's HTTP API, metrics and log on top of a simulated scheduler, as a real process."""
