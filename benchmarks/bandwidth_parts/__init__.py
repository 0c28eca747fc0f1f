"""Parts of `benchmarks.bandwidth`."""
