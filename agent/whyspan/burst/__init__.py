"""Bursts: dear measurements of one process, for seconds and on demand, that end by themselves.

What a burst costs is told before it begins, and one that would cost too much is refused. Its programs are held by
descriptors of the process that runs it and by nothing else: they vanish with it, however it ends.
"""
