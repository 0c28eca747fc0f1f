"""Parts of `benchmarks.peers`."""
