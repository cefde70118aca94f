"""Commands, one file each; output is text for people or JSON for scripts."""
