"""A fake server with vLLM's process tree (`fake_processes`); a program of its own for the reason of `fake_server`."""

from fake_processes import main

main()
