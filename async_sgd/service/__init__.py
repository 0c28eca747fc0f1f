"""The gRPC services of a hub around its state machine and journal."""
