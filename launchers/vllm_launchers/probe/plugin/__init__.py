"""The folder to put on a server's ``PYTHONPATH``: the plugin's module, and the entry point that vLLM finds."""
