"""Parts of `benchmarks.chaos`."""
