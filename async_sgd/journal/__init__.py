"""The journal of a hub: what it decides is written down before it happens; snapshots and recovery."""
