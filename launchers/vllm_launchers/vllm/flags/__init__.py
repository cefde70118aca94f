"""The flags of a vLLM: learned from an installation's source, or from the table of releases."""
