"""A server of rollouts: engines in a thread, gRPC for trainers, HTTP for everybody else."""
