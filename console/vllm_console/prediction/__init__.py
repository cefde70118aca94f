"""Predicts the effect of a change of flags on a server's own traffic: fitted to its records, replayed, scored
afterwards.
"""
