"""Kinds of work by known frames."""

from __future__ import annotations

from pathlib import Path

import pytest
from whyspan.code.workkinds import BUILT_IN, WorkKinds, load
from whyspan.errors import ConfigError
from whyspan.model import CodeFrame

SITE = "/opt/venv/lib/python3.12/site-packages"
HANDLER = CodeFrame("chat", "/srv/app/serve.py", 12)


@pytest.fixture(scope="module")
def kinds() -> WorkKinds:
    return WorkKinds()


@pytest.mark.parametrize(
    ("file", "function", "kind"),
    [
        (
            f"{SITE}/transformers/tokenization_utils_fast.py",
            "PreTrainedTokenizerFast._encode_plus",
            "tokenisation",
        ),
        (
            f"{SITE}/transformers/models/llama/tokenization_llama.py",
            "LlamaTokenizer.tokenize",
            "tokenisation",
        ),
        (f"{SITE}/vllm/v1/engine/detokenizer.py", "FastIncrementalDetokenizer.decode_next", "tokenisation"),
        (f"{SITE}/jinja2/environment.py", "Template.render", "chat template"),
        ("<template>", "root", "chat template"),
        ("/usr/lib/python3.11/json/encoder.py", "JSONEncoder.iterencode", "JSON"),
        ("/usr/lib/python3.11/logging/__init__.py", "StreamHandler.emit", "logging"),
        ("/usr/lib/python3.11/re/_compiler.py", "_compile", "regular expression"),
        (f"{SITE}/PIL/Image.py", "Image.resize", "images and media"),
        (f"{SITE}/torch/_inductor/codecache.py", "PyCodeCache.load", "compilation"),
        ("<frozen importlib._bootstrap>", "_find_and_load", "compilation"),
        (f"{SITE}/prometheus_client/metrics.py", "Histogram.observe", "metrics and tracing"),
        ("/srv/json_tools/encoder.py", "encode", None),
        ("/srv/app/tokenization.py", "tokenize", None),
        ("", "", None),
    ],
)
def test_a_frame_of_python(kinds: WorkKinds, file: str, function: str, kind: str | None) -> None:
    found = kinds.of([CodeFrame(function, file, 1), HANDLER], [])
    assert (found.name if found else None) == kind
    if found:
        assert found.fix


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("encoder_listencode_obj [_json.cpython-311-x86_64-linux-gnu.so]", "JSON"),
        ("_json.cpython-311-x86_64-linux-gnu.so+0x1f20", "JSON"),
        ("tokenizers.abi3.so+0x44", "tokenisation"),
        ("deduce_unreachable [python3.11]", "garbage collection"),
        ("deflate [libz.so.1.2.13]", "compression"),
        ("memcpy [libc.so.6]", None),
        ("python3.11+0x55", None),
    ],
)
def test_a_native_frame(kinds: WorkKinds, name: str, kind: str | None) -> None:
    found = kinds.of([HANDLER], [name])
    assert (found.name if found else None) == kind


def test_the_innermost_known_frame_decides(kinds: WorkKinds) -> None:
    dumps = CodeFrame("dumps", "/usr/lib/python3.11/json/__init__.py", 1)
    emit = CodeFrame("Handler.emit", "/usr/lib/python3.11/logging/__init__.py", 1)
    found = kinds.of([CodeFrame("default", "/srv/app.py", 3), dumps, emit], ["memcpy [libc.so.6]"])
    assert found is not None and found.name == "JSON"


def test_what_lies_below_the_interpreter_is_not_looked_at(kinds: WorkKinds) -> None:
    native = ["_PyEval_EvalFrameDefault [python3.11]", "encoder_call [_json.cpython-311-x86_64-linux-gnu.so]"]
    assert kinds.of([HANDLER], native) is None
    assert kinds.of([], native) is not None


def test_a_file_of_the_users_own_comes_first(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[[kind]]\nname = "prompt assembly"\nframes = ["app/serve.py:chat*", "json/*.py:dumps"]\n'
    )
    kinds = WorkKinds([mine])
    found = kinds.of([HANDLER], [])
    assert found is not None and (found.name, found.fix) == ("prompt assembly", "")
    found = kinds.of([CodeFrame("dumps", "/usr/lib/python3.11/json/__init__.py", 1)], [])
    assert found is not None and found.name == "prompt assembly"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[kind]]\nframes = []\n", "name"),
        ("[[kind]]\nname = 'x'\nframe = ['y']\n", "unknown field `frame`"),
        ("kind = 1\n", "array"),
        ("[[kind\n", "known frames"),
        ("[[kind]]\nname = 'x'\nframes = ['" + "a" * 201 + "']\n", "200"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="known frames") as e:
        WorkKinds([path])
    assert why in str(e.value) and str(path) in str(e.value) and "\n" not in str(e.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        WorkKinds([tmp_path / "none.toml"])


def test_the_built_in_file_has_something_to_do_about_each() -> None:
    kinds = load(BUILT_IN)
    assert len({k.name for k in kinds}) == len(kinds) >= 10
    assert all(k.fix and (k.frames or k.native) for k in kinds)
