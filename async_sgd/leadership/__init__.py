"""Who leads a run: votes, configurations and what may be acknowledged. No clock, no socket, no file."""
