"""The GPUs of this machine or of a recorded one: facts, owners, links."""
