"""Simulation of hubs, nodes, their disks and the network between them, for the protocol of failover."""
