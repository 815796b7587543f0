"""Programs that use the stub libraries: each has a process of its own, since a process has one device for life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.demo.procs import ROOT
from tests.stubs.device import Device

_BEFORE = """
import ctypes, json, os, resource, sys, time
from ctypes import addressof, byref, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from tests.stubs.cuda import *

def out(value): print(json.dumps(value), flush=True)
def switches(): return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
def hear(): return sys.stdin.readline().strip()
"""


def start(device: Device | None, code: str, **environment: str) -> subprocess.Popen[str]:
    """Start a program; its ``out`` writes a line of JSON, its ``hear`` waits for a line."""
    env = (device.env if device else dict(os.environ)) | environment
    return subprocess.Popen(
        [sys.executable, "-c", _BEFORE + code],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def hear(process: subprocess.Popen[str]) -> Any:
    """Return the next value that a program gives out."""
    assert process.stdout
    line = process.stdout.readline()
    assert line, "the program ended"
    return json.loads(line)


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    """Let a program go on."""
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()


def run(device: Device | None, code: str, **environment: str) -> Any:
    """Run a program to its end; return what it gave out last."""
    process = start(device, code, **environment)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    return json.loads(text.splitlines()[-1]) if text else None
