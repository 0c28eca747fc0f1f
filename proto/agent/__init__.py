"""The node agent: the process that owns a node's connections, transfers and watchdog. Imports no torch."""
