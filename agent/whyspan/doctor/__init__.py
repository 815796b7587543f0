"""What ``whyspan doctor`` finds out: facts gathered once, and judged by pure functions; a module for each group."""
