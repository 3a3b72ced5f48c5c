"""The benchmarks whose tables stand in the README."""
