"""Measuring: the same prompts through several ways to generate."""
