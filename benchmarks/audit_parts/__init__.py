"""Parts of `benchmarks.audit`."""
