"""What a server reports now: scraping, metric families across vLLM versions, windows (rates, shares, quantiles)."""
