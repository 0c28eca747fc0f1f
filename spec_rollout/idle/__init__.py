"""Drafter training in idle windows: a suspended process or a low-priority CUDA stream."""
