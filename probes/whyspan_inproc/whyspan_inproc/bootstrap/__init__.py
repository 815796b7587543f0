"""Put on PYTHONPATH by ``whyspan-instrument``; see ``sitecustomize``."""
