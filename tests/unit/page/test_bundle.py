"""Modules made one script: what runs in it, and what is refused rather than changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from whyspan.page.assets import FOLDER
from whyspan.page.bundle import BundleError, bundle

from tests.boards import tools


def write(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return folder / "main.js"


def run(script: str) -> object:
    node = tools.node()
    if node is None:
        pytest.skip("needs Node.js")
    done = subprocess.run([str(node), "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_scopes_stay_apart_and_each_module_runs_once(tmp_path: Path) -> None:
    entry = write(
        tmp_path,
        main='import { a as first, Thing } from "./one.js";\nimport {\n  b,\n} from "./two.js"; // why\n'
        "const hidden = 3;\nconsole.log(JSON.stringify([first(), b, new Thing().x, hidden, globalThis.runs]));\n",
        one='import { b } from "./two.js";\nconst hidden = 1;\nexport function a() {\n  return hidden + b;\n}\n'
        "class Thing {\n  x = 7;\n}\nexport { Thing };\n",
        two="globalThis.runs = (globalThis.runs ?? 0) + 1;\nconst hidden = 2;\nexport const b = hidden * 10;\n"
        "export async function unused() {}\n/** @type {import('./one.js').Thing} */\n",
    )
    assert run(bundle(entry)) == [21, 20, 7, 3, 1]


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ({"main": 'import x from "./one.js";', "one": ""}, "main.js: not a form"),
        ({"main": 'import * as x from "./one.js";', "one": ""}, "main.js: not a form"),
        ({"main": 'import { x } from "elsewhere";'}, "main.js: not a form"),
        ({"main": 'import { x } from "https://example.com/x.js";'}, "main.js: not a form"),
        ({"main": "export default 3;"}, "main.js: not a form"),
        ({"main": "export let x = 3;"}, "main.js: not a form"),
        ({"main": 'const x = () => import("./one.js");', "one": ""}, "main.js: not a form"),
        ({"main": "const x = import.meta.url;"}, "main.js: not a form"),
        ({"main": 'import { x } from "./none.js";'}, "none.js: No such file"),
        (
            {
                "main": 'import { x } from "./one.js";',
                "one": 'import { y } from "./main.js";\nexport const x = 1;',
            },
            "main.js imports itself",
        ),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, modules: dict[str, str], says: str) -> None:
    with pytest.raises(BundleError, match=says):
        bundle(write(tmp_path, **modules))


def test_the_report_can_be_bundled() -> None:
    script = bundle(FOLDER / "alone.js")
    assert "request/report.js" in script
    assert "fetch(" not in script  # it has nothing to ask anybody
