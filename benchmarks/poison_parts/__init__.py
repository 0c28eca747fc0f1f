"""Parts of `benchmarks.poison`."""
