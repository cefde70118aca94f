"""What a server reports: scraping, metric families across vLLM versions, windows (rates, shares, quantiles)."""
