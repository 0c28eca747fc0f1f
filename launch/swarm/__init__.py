"""The peer process of a swarm: finds the other peers and hosts replicas of parts of the model."""
