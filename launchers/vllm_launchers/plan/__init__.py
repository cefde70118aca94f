"""Preset + model + engine + the person's changes → argv, environment, port. Pure: no clock, no files, no network."""
