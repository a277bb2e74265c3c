"""What a dashboard is made of, and its JSON in Grafana's format (schema version 39).

Knows nothing of Shoal's metrics. Panels flow from left to right on Grafana's grid of 24
columns; a section is a row over its panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]

_SCHEMA_VERSION = 39
_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One graph. `text` is what a person reads when they point at its title."""

    title: str
    unit: str
    queries: Sequence[Query]
    text: str
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """`uid` is in its address; `variables` are label queries by name, beside the data source."""

    uid: str
    title: str
    variables: dict[str, str]
    sections: Sequence[Section]


def to_json(dashboard: Dashboard) -> Json:
    """The dashboard as Grafana imports it."""
    variables = [_variable(name, query) for name, query in dashboard.variables.items()]
    panels: list[Json] = []
    top = 0
    for section in dashboard.sections:
        panels.append(_row(section.title, len(panels) + 1, top))
        top += 1
        left = tallest = 0
        for panel in section.panels:
            if left + panel.width > _COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            panels.append(_panel(panel, len(panels) + 1, left, top))
            left += panel.width
            tallest = max(tallest, panels[-1]["gridPos"]["h"])
        top += tallest
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["shoal"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source(), *variables]},
        "annotations": {"list": []},
        "links": [{"type": "dashboards", "tags": ["shoal"], "title": "Shoal", "asDropdown": True}],
        "panels": panels,
    }


def _source() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _variable(name: str, query: str) -> Json:
    """`job` is one fleet; every other variable may be several, or all."""
    several = name != "job"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "multi": several,
        "includeAll": several,
        **({"allValue": ".+", "current": {"text": "All", "value": "$__all"}} if several else {}),
    }


def _row(title: str, number: int, top: int) -> Json:
    position = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "gridPos": position, "panels": []}


def _panel(panel: Panel, number: int, left: int, top: int) -> Json:
    height = 4 if panel.kind == "stat" else 8
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"h": height, "w": panel.width, "x": left, "y": top},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
    return defaults


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"scheme": "Oranges"}}
    return {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
