"""The load generator: a preset's workload shape, sent over HTTP and measured at the client."""
