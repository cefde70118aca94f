"""Predicts the effect of changed flags on a server's own traffic: fitted to records, replayed, scored afterwards."""
