"""What is wrong, told to those who do not look: checks, a log, terminals, a webhook, rules for Prometheus."""
