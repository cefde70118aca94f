"""A fake server with vLLM's process tree (`fake_processes`); a separate program for the same reason as
`fake_server`."""

from fake_processes import main

main()
