"""Choice of the speculation arm: expected tokens per second, bandit, calibration, step times."""
