"""Screens and their stylesheets."""
