"""Parts of the benchmark of policy versions."""
