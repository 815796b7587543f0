"""The processes: what reads, waits, forks and sends, around the pure core."""
