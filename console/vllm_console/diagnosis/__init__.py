"""From symptoms to named failures and findings. Pure: data in, findings out."""
