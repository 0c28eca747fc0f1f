"""Parts of `benchmarks.straggler`."""
