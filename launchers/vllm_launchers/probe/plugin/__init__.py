"""The folder that goes on a server's ``PYTHONPATH``: the plugin's module, and the entry point that vLLM finds."""
