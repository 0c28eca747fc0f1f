"""Checks that rollouts of a server are those of the policy."""
