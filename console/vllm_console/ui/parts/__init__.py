"""Helpers owned by screens: plain objects with explicit collaborators, and pure models of edited data."""
