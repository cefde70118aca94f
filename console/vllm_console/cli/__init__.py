"""Commands: one file each; prints for people, or as JSON for scripts."""
