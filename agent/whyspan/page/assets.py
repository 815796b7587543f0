"""The package's own files: the page, its modules and what they draw with."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Final

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER: Final = Path(__file__).with_name("assets")


class Assets(StaticFiles):
    """Serves the files; the browser asks each time whether it has the newest."""

    def __init__(self) -> None:
        """Name the folder."""
        # A browser runs no module of another type, and what the system says differs.
        mimetypes.add_type("text/javascript", ".js")
        super().__init__(directory=FOLDER, follow_symlink=False)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or raise that it is not here."""
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response
