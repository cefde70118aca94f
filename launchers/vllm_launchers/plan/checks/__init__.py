"""What stands in the way of a launch, or will hurt it: findings with stable codes."""
