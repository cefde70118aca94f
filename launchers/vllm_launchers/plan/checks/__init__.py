"""What blocks a launch, or will hurt it: findings with stable codes."""
