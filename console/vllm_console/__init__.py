"""vllm-console: launches, supervises, monitors and tunes local vLLM servers from a terminal."""

__version__ = "0.1.0"
