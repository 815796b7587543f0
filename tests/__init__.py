"""Test suites and the workloads that they share; never installed."""
