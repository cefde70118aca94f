"""Panes: they draw a snapshot, do no I/O and do not know each other."""
