"""Parts of `benchmarks.drift`."""
