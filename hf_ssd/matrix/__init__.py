"""What works with `generate()` works with SSD: tiny models of many families, and random arguments."""
