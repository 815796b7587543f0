"""The demo: a streaming server, four real faults, the agent beside it, and the client's clock as the judge.

Run it as ``python -m tests.demo`` (or ``make demo``).
"""
