"""Which flags a vLLM has: learned from an installation's source, or from the table of releases."""
