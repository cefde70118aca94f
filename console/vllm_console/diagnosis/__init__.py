"""From symptoms to named failures. Pure: data in, findings out."""
