"""The speculative generation engine."""
