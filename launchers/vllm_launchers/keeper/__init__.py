"""The keeper: one small process that holds one server. Standard library only."""
