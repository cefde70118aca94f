"""Server logs of any size: read from the end, followed over rotation, searched in slices, sanitized for display."""
