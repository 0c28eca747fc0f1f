"""A trainer's connections to rollout servers."""
