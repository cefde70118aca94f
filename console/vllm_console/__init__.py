"""vllm-console: launches, keeps, watches and tunes local vLLM servers from a terminal."""

__version__ = "0.1.0"
