"""Presets: a server's purpose, its flags, and the reasons for them. Reads the shipped ones and the user's own."""
