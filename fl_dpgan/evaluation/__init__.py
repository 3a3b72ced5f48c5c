"""Measures of what a generator is good for."""
