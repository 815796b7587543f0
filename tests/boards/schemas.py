"""Schemas of files that Grafana and Compose read: an unknown key is an error, as neither of them would say.

Source: Grafana's documentation v13.3, administration/provisioning, alerting/set-up/provision-alerting-resources/
file-provisioning, datasources/tempo/configure-tempo-data-source, datasources/prometheus/configure; the Compose
specification, 05-services.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml


class _Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Exemplar(_Strict):
    name: str
    datasourceUid: str


class PrometheusData(_Strict):
    httpMethod: Literal["GET", "POST"]
    prometheusType: Literal["Prometheus", "Mimir", "Cortex", "Thanos"]
    timeInterval: str
    exemplarTraceIdDestinations: list[Exemplar]


class Tag(_Strict):
    key: str
    value: str


class Linked(_Strict):
    name: str
    query: str


class TracesToMetrics(_Strict):
    datasourceUid: str
    spanStartTimeShift: str
    spanEndTimeShift: str
    tags: list[Tag]
    queries: list[Linked]


class Enabled(_Strict):
    enabled: bool


class Search(_Strict):
    hide: bool


class TraceQuery(_Strict):
    timeShiftEnabled: bool
    spanStartTimeShift: str
    spanEndTimeShift: str


class SpanBar(_Strict):
    type: Literal["None", "Duration", "Tag"]
    tag: str = ""


class TempoData(_Strict):
    tracesToMetrics: TracesToMetrics
    nodeGraph: Enabled
    search: Search
    traceQuery: TraceQuery
    spanBar: SpanBar


class Source(_Strict):
    name: str
    uid: str
    type: Literal["prometheus", "tempo"]
    access: Literal["proxy"]
    url: str
    jsonData: dict[str, Any]
    isDefault: bool = False
    editable: bool = False


class Sources(_Strict):
    apiVersion: Literal[1]
    datasources: list[Source]
    prune: bool = False


class ProviderOptions(_Strict):
    path: str
    foldersFromFilesStructure: bool


class Provider(_Strict):
    name: str
    orgId: int
    folder: str
    folderUid: str
    type: Literal["file"]
    disableDeletion: bool
    updateIntervalSeconds: int
    allowUiUpdates: bool
    options: ProviderOptions


class Providers(_Strict):
    apiVersion: Literal[1]
    providers: list[Provider]


class Range(_Strict):
    from_: int = msgspec.field(name="from")
    to: int


class Evaluator(_Strict):
    type: Literal["gt", "lt"]
    params: list[float]


class Condition(_Strict):
    evaluator: Evaluator


class Threshold(_Strict):
    refId: str
    type: Literal["threshold"]
    expression: str
    conditions: list[Condition]


class Instant(_Strict):
    refId: str
    expr: str
    instant: bool
    range: bool
    editorMode: Literal["code", "builder"]


class Step(_Strict):
    refId: str
    relativeTimeRange: Range
    datasourceUid: str
    model: dict[str, Any]


class Rule(_Strict):
    uid: str
    title: str
    condition: str
    data: list[Step]
    noDataState: Literal["Alerting", "NoData", "OK", "KeepLast"]
    execErrState: Literal["Alerting", "Error", "OK", "KeepLast"]
    for_: str = msgspec.field(name="for")
    annotations: dict[str, str]
    labels: dict[str, str]


class Group(_Strict):
    orgId: int
    name: str
    folder: str
    interval: str
    rules: list[Rule]


class Alerting(_Strict):
    apiVersion: Literal[1]
    groups: list[Group]


class Service(_Strict):
    image: str
    command: list[str] = []
    environment: dict[str, str] = {}
    volumes: list[str] = []
    ports: list[str] = []
    depends_on: list[str] = []
    restart: Literal["no", "always", "on-failure", "unless-stopped"] = "no"
    extra_hosts: list[str] = []
    user: str = ""


class Compose(_Strict):
    name: str
    services: dict[str, Service]
    volumes: dict[str, None]


def check_provisioning(kind: str, data: Any) -> None:
    """Check a provisioning file.

    Raises:
        ValueError: it has an unknown key, lacks one, or one has a wrong type.
    """
    if kind == "dashboards":
        msgspec.convert(data, Providers)
    elif kind == "datasources":
        for source in msgspec.convert(data, Sources).datasources:
            shape = PrometheusData if source.type == "prometheus" else TempoData
            msgspec.convert(source.jsonData, shape)
    else:
        for group in msgspec.convert(data, Alerting).groups:
            for rule in group.rules:
                query, threshold = rule.data
                asked = msgspec.convert(query.model, Instant)
                compared = msgspec.convert(threshold.model, Threshold)
                assert (asked.refId, compared.refId) == (query.refId, threshold.refId)
                assert compared.expression == asked.refId
                assert rule.condition == compared.refId


def check_compose(path: Path) -> None:
    """Check a Compose file, that what it mounts from here exists, and that each image has a version.

    Raises:
        ValueError: something is wrong.
    """
    found = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Compose)
    for name, service in found.services.items():
        version = service.image.rpartition(":")[2].rstrip("}")
        if not version[-1:].isdigit():
            raise ValueError(f"{name}: {service.image} has no version")
        for volume in service.volumes:
            outside = volume.partition(":")[0]
            if outside.startswith(".") and not (path.parent / outside).exists():
                raise ValueError(f"{name}: {outside} does not exist")
            if not outside.startswith(".") and outside not in found.volumes:
                raise ValueError(f"{name}: {outside} is no volume")
        for other in service.depends_on:
            if other not in found.services:
                raise ValueError(f"{name}: {other} is no service")
