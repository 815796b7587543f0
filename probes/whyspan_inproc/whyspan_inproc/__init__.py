"""What an inference process tells whyspan's agent of itself; nothing happens while nobody watches.

Importing this package has no effect. ``whyspan_inproc.auto`` installs the hooks.
"""

__version__ = "0.1.0"
