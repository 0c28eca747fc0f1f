"""Programs that benchmarks start as processes of their own: nodes, servers, clients and rivals."""
