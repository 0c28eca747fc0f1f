"""Configuration of a run: values, files, flags. Imports no torch."""
