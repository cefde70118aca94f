"""Conversations with one server: streamed answers with their figures. Nothing of them is written to a file."""
