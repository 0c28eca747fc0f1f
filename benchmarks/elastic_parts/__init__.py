"""Parts of `benchmarks.elastic`."""
