"""What servers reported over time: SQLite tiers on disk, the timeline for panes, the observed workload."""
