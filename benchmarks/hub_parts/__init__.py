"""Parts of `benchmarks.hub`."""
