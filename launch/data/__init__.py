"""Text to samples: readers, tokenizers, packing, order and leases."""
