"""A request in the formats of other tools."""
