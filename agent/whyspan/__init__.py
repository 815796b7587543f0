"""whyspan: why was this LLM request slow?"""

__version__ = "0.1.0"
