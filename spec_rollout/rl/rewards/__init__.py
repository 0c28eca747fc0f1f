"""Rewards: functions that score completions, computed in worker processes."""
