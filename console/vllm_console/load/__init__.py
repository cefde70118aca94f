"""The load generator: sends a preset's workload over HTTP and measures it at the client."""
