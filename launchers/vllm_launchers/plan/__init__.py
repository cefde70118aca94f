"""Preset + model + engine + the user's changes → argv, environment, port. Pure: no clock, no files, no network."""
