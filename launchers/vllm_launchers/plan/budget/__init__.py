"""Memory of a launch, worked out before it runs."""
