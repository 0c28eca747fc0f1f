"""The hub as a state machine: records in, records out, no clock and no I/O."""
