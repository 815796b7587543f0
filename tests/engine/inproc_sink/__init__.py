"""Put on PYTHONPATH by tests; see ``sitecustomize``."""
