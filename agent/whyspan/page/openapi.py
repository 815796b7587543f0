"""The description of the interface (OpenAPI 3.1), made from the structs that are read and written."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from whyspan import __version__
from whyspan.page import questions
from whyspan.page.answer import JSON, Problem
from whyspan.page.params import LONGEST_ID

_REF: Final = "#/components/schemas/{name}"
_ERRORS: Final = {
    "400": "a parameter is unknown or wrong",
    "401": "a token is needed",
    "404": "there is no such thing in the store",
    "503": "the store cannot be read, or there is too much to do",
}


def describe(*, token: bool) -> dict[str, Any]:
    """Return the document; *token*: the page has one."""
    types = [Problem, *(t for q in questions.ALL for t in (q.query, q.gives))]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    queries = {q.query.__name__: schemas[q.query.__name__] for q in questions.ALL}
    paths = {q.path: {"get": _operation(q, queries[q.query.__name__])} for q in questions.ALL}
    paths["/api/live"] = {
        "get": {
            "operationId": "live",
            "summary": "Server-sent events: the data is `requests` when there are newer requests, else `status`",
            "responses": {"200": {"description": "a stream", "content": {"text/event-stream": {}}}},
        }
    }
    components: dict[str, Any] = {"schemas": {n: s for n, s in schemas.items() if n not in queries}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "whyspan",
            "version": __version__,
            "description": "Why were requests slow? Read-only. Times inside a request are ns since its start.",
        },
        "servers": [{"url": "./"}],  # below whatever prefix this document was had at
        "paths": paths,
        "components": components,
    }
    if token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _operation(question: questions.Question, query: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    if question.names:
        schema = {"type": "string", "minLength": 1, "maxLength": LONGEST_ID}
        parameters.append({"name": question.names, "in": "path", "required": True, "schema": schema})
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in query.get("properties", {}).items()
    ]
    errors = [e for e in _ERRORS if question.names or e != "404"]
    reference = {"$ref": _REF.format(name="Problem")}
    return {
        "operationId": question.path.removeprefix("/api/").replace("/{id}", "_one"),
        "summary": question.summary,
        "parameters": parameters,
        "responses": {
            "200": {
                "description": "the answer",
                "content": {JSON: {"schema": {"$ref": _REF.format(name=question.gives.__name__)}}},
            },
            **{e: {"description": _ERRORS[e], "content": {JSON: {"schema": reference}}} for e in errors},
        },
    }
