"""Where findings go: the local store today, OTLP and Prometheus next."""
