"""A server with scripted responses."""

from fakes.scripted_chat import end, said, script  # noqa: F401 - fixtures of all tests here
