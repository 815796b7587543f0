"""What engines publish of themselves: KV-cache events, forward passes, ``/metrics``, health. No change to the engine.

Everything here but ``find`` runs in a process of its own, which holds no capability: the collector opens no
network connection.
"""
