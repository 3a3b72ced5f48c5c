"""The command line's larger parts: the groups `budget`, `site` and `server`, and `evaluate` and `watch`."""
