"""Chooses flags from traffic, model and machine, each with its reason and trade-off."""
