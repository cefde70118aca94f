"""The console in a browser on this machine: who may see it, and one console process for each page."""
