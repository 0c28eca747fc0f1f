"""Parts of `benchmarks.decode`."""
