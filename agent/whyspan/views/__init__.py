"""What is shown, as plain structs: pure functions over what the store's reader returns.

A struct is sent as JSON as it is. Times inside a request are ns since its start, absolute ones ms since the epoch:
both are exact in a double. All text comes from a watched process or a client: whoever shows it escapes it.
"""
