"""`aedit serve`: the process of a rollout server."""
