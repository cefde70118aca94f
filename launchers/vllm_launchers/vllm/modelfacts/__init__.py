"""A model's shape, number formats and size, from its files, the local cache or the hub."""
