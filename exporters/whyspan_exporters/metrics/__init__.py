"""Metrics: what there is to report (`catalogue`), one snapshot of it, and how it is encoded for OTLP and Prometheus."""
