"""From traffic, model and machine to flags, each with its reason and price."""
