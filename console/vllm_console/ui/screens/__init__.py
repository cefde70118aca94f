"""Screens, each with its stylesheet beside it."""
