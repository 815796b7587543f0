"""The fault bench of the engine causes: each injected into a server, judged by the client's clock."""
