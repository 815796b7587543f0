"""OTLP: findings as spans, the agent's own figures as metrics. Imported only when an endpoint is configured."""
