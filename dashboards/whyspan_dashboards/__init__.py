"""Dashboards, alert rules and provisioning as code: Grafana's JSON and YAML, and Prometheus' rules, are made from here.

Nothing of the agent imports this package, and it is not installed with it: only the files that it writes are shipped.
"""
