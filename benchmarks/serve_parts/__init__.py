"""Parts of `benchmarks.serve`."""
