"""Parts that screens own: plain objects with explicit collaborators, and pure models of what is edited."""
