"""eBPF probes: one C file and one Python file each, with the loader that attaches them."""
