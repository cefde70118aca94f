"""What a change of flags would do to a server's own traffic: fitted to its records, replayed, and scored afterwards."""
