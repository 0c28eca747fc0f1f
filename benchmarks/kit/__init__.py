"""Shared parts of the benchmarks: models and data, hubs, processes, clocks, statistics, tables."""
