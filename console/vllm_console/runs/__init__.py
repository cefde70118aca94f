"""What ran with which flags and how it performed; comparing runs."""
