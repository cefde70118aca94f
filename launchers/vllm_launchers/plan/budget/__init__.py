"""The memory of a launch, estimated before it runs."""
