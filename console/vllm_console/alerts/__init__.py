"""Alerts outside the console: checks, a log, terminal notifications, a webhook, rules for Prometheus."""
