"""The fault bench of the host's causes: a fault is one file of this package with an object ``FAULT``."""
