"""Policy versions: manifests, patches, and the memory of several versions."""
