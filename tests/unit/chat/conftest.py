"""A server that answers as a test tells it."""

from fakes.scripted_chat import end, said, script  # noqa: F401 - fixtures of all tests here
