"""The hub process: journal, snapshots, standby, and gRPC around `aedit.async_sgd.hub`. Imports no torch."""
