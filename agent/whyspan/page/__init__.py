"""The page of ``whyspan serve``: a web application over the store, read-only; and one request of it as one file.

`settings` says where it listens and who may look, `security` and `auth` refuse what a browser or a stranger should not
do, `api` answers in JSON what `openapi` describes, `server` runs it, `bundle` and `html` make ``explain --html``.
"""
