"""The command line's groups: `budget` and `site`."""
