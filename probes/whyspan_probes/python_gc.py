"""python_gc: long collections of CPython's garbage collector."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Probe, UserHook

#: The program itself, or the library that it is only a launcher of: whichever has the collector.
_PYTHON = r"/(lib)?python3(\.\d+)?[a-z]*(\.so(\.\d+)*)?$"
_COLLECTOR = "PyGC_Collect"  # exported since 2.0 by whatever has the collector
_NOTES = {"python:gc__start": 0, "python:gc__done": 1}
#: With the generation as their second argument: gc_collect_main up to 3.13 (Modules/gcmodule.c, then Python/gc.c and
#: gc_free_threading.c), _PyGC_Collect from 3.14. 3.13 has both, the latter only calling the former.
_FUNCTIONS = ("gc_collect_main", "_PyGC_Collect")
#: What compilers append to a function that they made another version of.
_VERSIONS = ("", ".lto_priv.0", ".constprop.0", ".isra.0", ".constprop.0.isra.0", ".lto_priv.0.constprop.0")
_SYMBOLS = {f"{name}{version}": 0 for name in _FUNCTIONS for version in _VERSIONS}


def _both(name: str) -> tuple[str, str]:
    return f"{name}_multi", f"{name}_perf"


PROBE = Probe(
    name="python_gc",
    title="long collections of Python's garbage collector",
    hooks=(),
    user_hooks=(
        UserHook(
            "notes",
            _PYTHON,
            {},
            _both("python_gc_note"),
            notes=_NOTES,
            defines=_COLLECTOR,
            required=False,
        ),
        # The returns first: of a collection whose entry is hooked before its return is, the end is inferred.
        UserHook(
            "collect_end",
            _PYTHON,
            _SYMBOLS,
            _both("python_gc_return"),
            unless="python:gc__start",
            defines=_COLLECTOR,
            first=True,
            required=False,
        ),
        UserHook(
            "collect",
            _PYTHON,
            _SYMBOLS,
            _both("python_gc_entry"),
            unless="python:gc__start",
            defines=_COLLECTOR,
            first=True,
        ),
    ),
    events={
        "gc_pause": {
            "aux": "generation, 255 not known; 256 its end was not seen: the next one of the thread began now",
            "begin_ns": "when it began",
            "collected": "objects that it freed or found uncollectable, -1 not known",
        },
        "gc_start": {"aux": "generation; told only where no ends are seen, and not of the youngest"},
    },
    cost=Cost.PER_UNIT,
    joins="thread on the critical path",
    needs="an interpreter with USDT notes or symbols; uprobe.multi (6.6) or perf uprobes; bpf cookies (5.15)",
    shed=8,
    config={"min_us": "shortest collection that is reported, us"},
)
