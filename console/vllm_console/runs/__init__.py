"""Runs, their flags and performance, and comparisons between runs."""
