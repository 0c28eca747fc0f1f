"""Leadership of a run: elections, configurations, what may be acknowledged. No clock, socket or file."""
