"""Forward pass of the policy for the engine: layers, KV cache, attention masks, CUDA graphs."""
