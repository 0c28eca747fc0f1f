"""Parts of `benchmarks.tail`."""
