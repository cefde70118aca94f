"""A plan in other tools' forms: shell, config file, systemd, Compose, Kubernetes."""
