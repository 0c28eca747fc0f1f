"""Parts of `benchmarks.idle`."""
