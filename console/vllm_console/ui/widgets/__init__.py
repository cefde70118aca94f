"""Widgets that panes and screens are built from."""
