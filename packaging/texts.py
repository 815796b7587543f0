"""What a package says of itself: man pages, completions, changelog, copyright. Most is taken from the code."""

from __future__ import annotations

import email.message
import email.parser
import email.utils
import json
import time
from pathlib import Path

from common import PACKAGING, PREFIX, ROOT, date_s, project, run

_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/whyspan",
    "zsh": "usr/share/zsh/vendor-completions/_whyspan",
    "fish": "usr/share/fish/vendor_completions.d/whyspan.fish",
}

_BSD_2_CLAUSE = """\
Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
following conditions are met:

1. Redistributions of source code must retain the above copyright notice, this list of conditions and the following
disclaimer.

2. Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
disclaimer in the documentation and/or other materials provided with the distribution.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY,
WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF
THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
"""


def from_commands(tools: Path, modules: Path, tree: Path) -> None:
    """Write man pages and completions below *tree*, made by click and click-man from the commands of *modules*.

    Raises:
        BuildError: a command's module cannot be imported, or has no help.
    """
    pages = tree / "usr/share/man/man1"
    pages.mkdir(parents=True)
    told = json.loads(
        run(
            [tools, "-IB", PACKAGING / "commands.py", modules, pages, project()["version"]],
            env={"SOURCE_DATE_EPOCH": str(date_s())},
        )
    )
    for shell, place in _COMPLETIONS.items():
        path = tree / place
        path.parent.mkdir(parents=True)
        path.write_text(told[shell])


def changelog(version: str, maintainer: str) -> str:
    """Return debian/changelog with one entry; the changes themselves are in CHANGELOG.md beside it."""
    when = email.utils.formatdate(date_s(), localtime=False)
    return (
        f"whyspan ({version}) unstable; urgency=medium\n\n"
        f"  * Release {project()['version']}: see CHANGELOG.md in /usr/share/doc/whyspan.\n\n"
        f" -- {maintainer}  {when}\n"
    )


def copyright_file(modules: Path, maintainer: str) -> str:
    """Return the copyright file: whyspan's licence, and each bundled library's as its own metadata states it."""
    year = time.gmtime(date_s()).tm_year
    own = (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        "Upstream-Name: whyspan\n"
        f"Upstream-Contact: {maintainer}\n"
        "Source: the repository this package was built from\n\n"
        f"Files: *\nCopyright: {year} the whyspan authors\nLicense: Apache-2.0\n\n"
        "Files: usr/lib/whyspan/lib/*/site-packages/whyspan_probes/*.bpf.o\n"
        f"Copyright: {year} the whyspan authors\nLicense: GPL-2.0-only or BSD-2-Clause\n"
    )
    texts = [own]
    for info in sorted(modules.glob("*.dist-info")):
        if info.name.startswith("whyspan"):
            continue
        meta = email.parser.Parser().parsestr((info / "METADATA").read_text(), headersonly=True)
        name, version = meta["Name"], meta["Version"]
        licence = _one_line(meta["License-Expression"] or _classified(meta))
        author = _one_line(
            meta["Author"] or meta["Author-email"] or meta["Maintainer-email"] or "its authors"
        )
        files = sorted(p.relative_to(modules).as_posix() for p in info.rglob("*") if _is_licence(p))
        own_texts = "\n".join(f" /{PREFIX}/lib/*/site-packages/{f}" for f in files)
        texts.append(
            f"Files: {PREFIX}/lib/*/site-packages/{info.name}/*\n"
            f"Copyright: {author}\nLicense: {name}-terms\n"
            f" {name} {version} ({licence}), as published on PyPI. Its own texts:\n"
            + (own_texts or " its METADATA file, in the same folder")
            + "\n"
        )
    texts.append(
        "License: Apache-2.0\n On Debian systems the text is in /usr/share/common-licenses/Apache-2.0\n\n"
        "License: GPL-2.0-only or BSD-2-Clause\n"
        " On Debian systems the text of the first is in /usr/share/common-licenses/GPL-2,\n the second is:\n"
        + "".join(f" {line or '.'}\n" for line in _BSD_2_CLAUSE.splitlines())
    )
    return "\n".join(texts)


def _is_licence(path: Path) -> bool:
    name = path.name.lower()
    return path.is_file() and name.startswith(("licen", "copying", "notice", "authors"))


def _classified(meta: email.message.Message) -> str:
    # What older metadata has: classifiers, or a field that may hold a whole licence.
    found = [c.rsplit(" :: ", 1)[1] for c in meta.get_all("Classifier", []) if c.startswith("License :: ")]
    return ", ".join(found) or (meta["License"] or "see there").strip().split("\n")[0]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def documents(tree: Path) -> None:
    """Put README, changelog and the example of a drop-in where a package's documents are."""
    folder = tree / "usr/share/doc/whyspan"
    (folder / "examples").mkdir(parents=True)
    for name in ("README.md", "CHANGELOG.md", "SECURITY.md"):
        if (ROOT / name).exists():
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for example in (PACKAGING / "systemd").glob("*.conf"):
        (folder / "examples" / example.name).write_bytes(example.read_bytes())
    daemon_set = PACKAGING / "kubernetes/daemonset.yaml"
    if daemon_set.exists():
        (folder / "examples" / daemon_set.name).write_bytes(daemon_set.read_bytes())
