"""Parts of `benchmarks.quality`."""
