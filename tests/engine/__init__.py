"""A real vLLM server on the CPU: installed in an environment of its own, started healthy, loaded, and watched."""
