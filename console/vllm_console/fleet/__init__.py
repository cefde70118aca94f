"""The one façade that ``cli`` and ``ui`` act through: a snapshot of every server out, a few verbs in."""
