"""The servers that host faults are injected into, each a process of its own with the same small interface."""
