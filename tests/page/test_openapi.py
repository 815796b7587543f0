"""The interface does what its description says, whatever it is asked: schemathesis on the real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks
from whyspan.page import openapi

from tests.page.served import Served, serve
from tests.unit import viewlab

CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, viewlab.Written]]:
    made = viewlab.build(tmp_path_factory.mktemp("small") / "s.db", 40, hours=0.1, evil=True)
    with serve(made.path) as found:
        yield found, made


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_question_breaks_it(small: tuple[Served, viewlab.Written], mode: GenerationMode) -> None:
    description = schemathesis.openapi.from_url(f"{small[0].url}openapi.json").exclude(path="/api/live")
    asked: set[str] = set()
    for found in description.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.query:
            asked.add(operation.path)  # there is no wrong way to ask it
            continue

        @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case[Any]) -> None:
            asked.add(case.path)
            # Null and nothing are sent as an empty text, which is every parameter's default and never wrong.
            empty = any(value in (None, "", [], {}) for value in (case.query or {}).values())
            assume(mode is GenerationMode.POSITIVE or not empty)
            case.call_and_validate(checks=CHECKS)

        ask()
    assert asked == {*openapi.describe(token=False)["paths"]} - {"/api/live"}
    assert small[0].process.poll() is None
    assert small[0].log.read_text() == ""
