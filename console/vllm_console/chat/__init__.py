"""Chats with one server: streamed answers with their figures. Nothing is written to disk."""
