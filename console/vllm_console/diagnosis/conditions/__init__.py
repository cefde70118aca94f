"""What is the matter with a running server: named conditions over its last half hour, each with its cure. Pure."""
