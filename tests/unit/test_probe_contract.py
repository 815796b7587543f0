"""What every probe must hold to; a new one is checked without being listed here."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from whyspan import heads
from whyspan_probes.btf import Btf
from whyspan_probes.errors import ProbeError
from whyspan_probes.kernel_btf import OWN
from whyspan_probes.loader import KINDS_PER_PROBE, event_types, program_sections
from whyspan_probes.probe import Cost, Hook, Probe
from whyspan_probes.registry import Found, discover
from whyspan_probes.schema import EVENT, EVENT_BYTES, HEAD_FIELDS, Schema
from whyspan_probes.shared_maps import MAX_KINDS

from tests.conftest import required_tiers

PROBES = discover()
each = pytest.mark.parametrize("found", PROBES, ids=[f.probe.name for f in PROBES])


def built(found: Found) -> Path:
    """Return the probe's object; skip when there is none, unless the tier bpf is required."""
    if not found.object_path.exists():
        reason = f"{found.object_path.name} is not built: run `make build`"
        if "bpf" in required_tiers(os.environ.get("WHYSPAN_REQUIRE")):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found.object_path


@pytest.fixture
def btf_of() -> Iterator[Callable[[Found], Btf]]:
    """Open objects' BTF, and close it afterwards."""
    opened: list[Btf] = []

    def open_(found: Found) -> Btf:
        opened.append(Btf.of_file(str(built(found))))
        return opened[-1]

    yield open_
    for btf in opened:
        btf.close()


def test_there_are_probes() -> None:
    assert {"sched", "sockets"} <= {f.probe.name for f in PROBES}


@each
def test_the_object_lays_out_what_is_declared(found: Found, btf_of: Callable[[Found], Btf]) -> None:
    # Raises when names differ, or a struct has a hole, padding at its end, or a type no record can carry.
    types = event_types(found.probe, btf_of(found), 0)
    assert {t.name for t in types} == set(found.probe.events)
    assert len({t.kind for t in types}) == len(types)
    for t in types:
        assert t.dtype.itemsize == EVENT_BYTES
        fields = t.dtype.fields
        assert fields is not None
        common = EVENT.fields
        assert common is not None
        for name in HEAD_FIELDS:
            assert fields[name][:2] == common[name][:2]
        end = 0
        for name in t.dtype.names or ():
            assert fields[name][1] == end
            end += fields[name][0].itemsize
        assert end == EVENT_BYTES


@each
def test_every_field_has_a_text(found: Found) -> None:
    p = found.probe
    for event, fields in p.events.items():
        assert event.isidentifier()
        for name, text in fields.items():
            assert text.strip() == text and text, f"{event}.{name} has no text"
            assert "\n" not in text
            assert name not in set(HEAD_FIELDS) - {"aux"}, f"{event}.{name} belongs to the common head"
    for text in (p.title, p.joins, p.needs, *p.config.values()):
        assert text.strip() == text and text
        assert "\n" not in text
    assert isinstance(p.cost, Cost)
    assert p.shed >= 0


@each
def test_every_configuration_field_is_documented(found: Found, btf_of: Callable[[Found], Btf]) -> None:
    btf = btf_of(found)
    variables = btf.variables(".rodata")
    assert {"cfg", "whyspan_run"} <= set(variables)
    names = btf.dtype(variables["cfg"].type_id, "cfg").names or ()
    assert {n for n in names if not n.startswith("_pad")} == set(found.probe.config)
    run = btf.dtype(variables["whyspan_run"].type_id, "whyspan_run").names or ()
    assert {"key_secret", "shard_mask", "kind_base"} <= set(run)


@each
def test_hooks_and_programs_name_each_other(found: Found) -> None:
    sections = program_sections(built(found))
    # Alternatives of one hook may share programs: one has some more, for what only some kernels have.
    named = [p for h in found.probe.hooks for p in sorted({p for a in h.alternatives for p in a})]
    assert all(len(a) == len(set(a)) for h in found.probe.hooks for a in h.alternatives)
    named += [p for h in found.probe.user_hooks for p in h.programs]
    assert set(named) == set(sections), "a program nobody attaches, or one that is not there"
    assert len(named) == len(set(named))
    for hook in found.probe.hooks:
        assert hook.alternatives
        assert all(hook.alternatives)
    for user in found.probe.user_hooks:
        assert user.symbols or user.notes
        # Alternatives of one thing: all at the entry of the function, or all at its return.
        assert len({sections[p].partition(".")[0] for p in user.programs}) == 1
        assert {sections[p] for p in user.programs} <= {
            "uprobe.multi",
            "uprobe",
            "uretprobe.multi",
            "uretprobe",
        }
        re.compile(user.library)
    names = found.probe.hook_names()
    assert len(set(names)) == len(names)
    assert any(h.required for h in found.probe.hooks) or any(h.required for h in found.probe.user_hooks)


def test_together_they_make_a_schema(btf_of: Callable[[Found], Btf]) -> None:
    # Schema refuses a name or a kind that two probes claim.
    types = [t for i, f in enumerate(PROBES) for t in event_types(f.probe, btf_of(f), i * KINDS_PER_PROBE)]
    schema = Schema(types)
    assert len(schema.types) == sum(len(f.probe.events) for f in PROBES)
    assert max(schema.by_kind) < MAX_KINDS


def test_the_order_of_shedding_is_unambiguous() -> None:
    order = [f.probe.shed for f in PROBES if f.probe.shed]
    assert len(order) == len(set(order))


def test_pieces_of_request_heads_are_read_as_the_kernel_writes_them(btf_of: Callable[[Found], Btf]) -> None:
    (sockets,) = (f for f in PROBES if f.probe.name == "sockets")
    dtype = btf_of(sockets).struct_dtype("http_piece")
    letters = {"<u8": "Q", "<u4": "I", "<u2": "H"}
    fields = dtype.fields
    assert fields is not None
    layout = "<" + "".join(letters[fields[n][0].str] for n in dtype.names or ())
    assert struct.Struct(layout).format == heads._PIECE.format
    rename = {"bytes": "size"}
    assert tuple(rename.get(n, n) for n in dtype.names or ()) == heads._Piece._fields


def sched() -> Found:
    return next(f for f in PROBES if f.probe.name == "sched")


@pytest.mark.parametrize(
    "change",
    [
        lambda events: {k: v for k, v in events.items() if k != "sched_exit"},
        lambda events: {**events, "sched_nap": {"x": "y"}},
        lambda events: {**events, "sched_fork": {**events["sched_fork"], "more": "y"}},
        lambda events: {**events, "sched_fork": {"child_tid": "x"}},
        lambda events: {**events, "sched_fork": {**events["sched_fork"], "ts_ns": "of the head"}},
    ],
)
def test_a_declaration_that_disagrees_is_refused(
    change: Callable[[object], dict[str, dict[str, str]]], btf_of: Callable[[Found], Btf]
) -> None:
    found = sched()
    wrong = replace(found.probe, events=change(found.probe.events))
    with pytest.raises(ProbeError):
        event_types(wrong, btf_of(found), 0)


def test_an_unknown_struct_is_refused(btf_of: Callable[[Found], Btf]) -> None:
    with pytest.raises(ProbeError, match="not in the object's BTF"):
        btf_of(sched()).struct_dtype("no_such_struct")


@pytest.mark.skipif(not OWN.exists(), reason="needs a kernel with BTF")
def test_a_struct_no_record_can_carry_is_refused() -> None:
    kernel = Btf.of_kernel()
    try:
        with pytest.raises(ProbeError, match="byte hole before l_start"):
            kernel.struct_dtype("flock")
        with pytest.raises(ProbeError, match="has a type that a record cannot carry"):
            kernel.struct_dtype("list_head")
        with pytest.raises(ProbeError, match="is a bit-field"):
            kernel.struct_dtype("iphdr")
    finally:
        kernel.close()


def test_an_object_that_is_missing_or_no_object(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="not built or cannot be read"):
        program_sections(tmp_path / "none.bpf.o")
    (tmp_path / "bad.bpf.o").write_bytes(b"\x7fELF garbage")
    with pytest.raises(ProbeError, match="not built or cannot be read"):
        program_sections(tmp_path / "bad.bpf.o")


PROBE = """
from whyspan_probes.probe import Cost, Hook, Probe
PROBE = Probe(name={name!r}, title="t", hooks=(), events={{}}, cost=Cost.BURST, joins="j", needs="n")
"""


def declare(folder: Path, name: str, text: str | None = None, source: str = ".bpf.c") -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}{source}").write_text("")
    if text is not None:
        (folder / f"{name}.py").write_text(text)


def test_a_pair_of_files_is_a_probe(tmp_path: Path) -> None:
    declare(tmp_path / "a", "zeta", PROBE.format(name="zeta"))
    declare(tmp_path / "a", "alpha", PROBE.format(name="alpha"), source=".bpf.o")  # installed without source
    declare(tmp_path / "b", "mid", PROBE.format(name="mid"))
    (tmp_path / "a" / "helper.py").write_text("raise RuntimeError('not a probe')")
    found = discover([tmp_path / "a", tmp_path / "b"])
    assert [f.probe.name for f in found] == ["alpha", "mid", "zeta"]
    assert found[2].object_path == tmp_path / "a" / "zeta.bpf.o"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is missing"),
        ("", "has no PROBE"),
        ("PROBE = 5", "has no PROBE"),
        (PROBE.format(name="other"), "declares 'other'"),
    ],
)
def test_a_broken_pair(tmp_path: Path, text: str | None, message: str) -> None:
    declare(tmp_path, "mine", text)
    with pytest.raises(ProbeError, match=message):
        discover([tmp_path])


def test_a_name_used_twice(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        declare(tmp_path / folder, "mine", PROBE.format(name="mine"))
    with pytest.raises(ProbeError, match="declared in"):
        discover([tmp_path / "a", tmp_path / "b"])


def test_a_hook_names_its_programs() -> None:
    assert Hook("h", (("a", "b"), ("c",))).programs() == {"a", "b", "c"}
    assert isinstance(PROBES[0].probe, Probe)
