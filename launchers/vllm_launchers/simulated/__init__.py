"""An engine without a GPU: vLLM's HTTP API, metrics and log over a simulated scheduler, as a real process."""
