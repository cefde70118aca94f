"""Problems of a running server: named findings over its last half hour, each with its fix. Pure."""
