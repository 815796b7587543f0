"""Every TraceQL query is one, by Grafana's own grammar."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.boards import boards

pytestmark = pytest.mark.boards


def judge(grammar: list[str], queries: list[str]) -> list[list[str]]:
    """Return what is wrong with each of *queries*."""
    done = subprocess.run(grammar, input=json.dumps(queries), capture_output=True, text=True, check=True)
    found: list[list[str]] = json.loads(done.stdout)
    assert len(found) == len(queries)
    return found


def test_traceql_parses(grammar: list[str]) -> None:
    queries = boards.traceql()
    assert len(queries) >= 5
    wrong = judge(grammar, [q.text for q in queries])
    assert {q.where: w for q, w in zip(queries, wrong, strict=True) if w} == {}


def test_the_grammar_finds_mistakes(grammar: list[str]) -> None:
    broken = ['{ name = "a" ', '{ name = "a" } | quantile_over_time(duration, .99', "{ span.x => 1 }"]
    assert all(judge(grammar, broken))
