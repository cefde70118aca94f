"""The keeper: one small process that supervises one server. Standard library only."""
