"""Parts of `benchmarks.swarm`."""
