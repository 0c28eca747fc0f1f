"""Policy losses: one pure function per file, found by name or import path."""
