"""The single façade for ``cli`` and ``ui``: a snapshot of every server out, verbs in."""
