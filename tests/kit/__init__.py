"""Shared parts of the tests: clusters, hubs, engines, oracles and the worker processes they run in."""
