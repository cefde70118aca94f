"""Presets: what a server is for, which flags that wants, and why. Reads the shipped ones and the person's own."""
