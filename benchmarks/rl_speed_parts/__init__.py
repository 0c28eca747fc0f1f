"""Parts of `benchmarks.rl_speed`."""
