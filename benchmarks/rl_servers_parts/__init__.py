"""Rollout servers and a trainer of a fixed pace, what happens to the servers, and a ledger of all samples."""
