"""The hub protocol over gRPC: generated messages, client, server, chunked arrays, limits and TLS."""
