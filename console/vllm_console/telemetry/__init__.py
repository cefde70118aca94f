"""What servers report: scraping, family names over vLLM versions, windows, history on disk, the recorder."""
