"""Parts of `benchmarks.rollout`."""
