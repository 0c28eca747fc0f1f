"""Adapters of the engine to trainers of other libraries."""
