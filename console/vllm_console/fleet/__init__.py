"""The facade for ``cli`` and ``ui``: provides a snapshot of all servers, and the actions on them."""
