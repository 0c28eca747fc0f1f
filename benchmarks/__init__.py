"""One module per table; `python -m benchmarks.NAME` prints it."""
