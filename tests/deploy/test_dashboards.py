"""The dashboards: up to date, well-formed, and in the chart."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deploy.k8s.grafana.__main__ import FOLDER, render
from tests.deploy.charts import Helm

BOARDS = {name: json.loads(text) for name, text in render().items()}

_SOURCE = {"const": {"type": "prometheus", "uid": "${datasource}"}}
_TEXT = {"type": "string", "minLength": 1}
_GRID = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "additionalProperties": False,
    "properties": {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    },
}
_TARGET = {
    "type": "object",
    "required": ["refId", "expr", "datasource", "legendFormat"],
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "expr": _TEXT, "datasource": _SOURCE},
}
_PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["row", "timeseries", "stat", "heatmap"]},
        "title": _TEXT,
        "gridPos": _GRID,
    },
    "if": {"properties": {"type": {"const": "row"}}},
    "else": {
        "required": ["description", "datasource", "fieldConfig", "options", "targets"],
        "properties": {
            "description": _TEXT,
            "datasource": _SOURCE,
            "targets": {"type": "array", "minItems": 1, "items": _TARGET},
            "fieldConfig": {
                "required": ["defaults", "overrides"],
                "properties": {"defaults": {"required": ["unit"]}},
            },
        },
    },
}
# The parts of Grafana's dashboard model (schema version 39) that these dashboards use.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "uid": {"pattern": "^[a-z-]{1,40}$"},
        "title": _TEXT,
        "schemaVersion": {"const": 39},
        "tags": {"type": "array", "items": _TEXT},
        "panels": {"type": "array", "minItems": 1, "items": _PANEL},
        "templating": {
            "required": ["list"],
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "required": ["name", "type", "query"],
                        "properties": {"type": {"enum": ["datasource", "query"]}},
                    },
                }
            },
        },
    },
}


def test_the_files_are_what_the_code_makes() -> None:
    written = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert written == render(), "run: python -m deploy.k8s.grafana"


@pytest.mark.parametrize("name", BOARDS)
def test_the_json_is_a_dashboard(name: str) -> None:
    board = BOARDS[name]
    Draft202012Validator(SCHEMA).validate(board)
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, f"{one} lies over {other}"


@pytest.mark.parametrize("name", BOARDS)
def test_queries_use_the_variables_that_there_are(name: str) -> None:
    board = BOARDS[name]
    known = {variable["name"] for variable in board["templating"]["list"]}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            assert 'job="$job"' in target["expr"]
            assert ("$instance" in target["expr"]) <= ("instance" in known)


def test_the_chart_gives_them_to_grafanas_sidecar(helm: Helm) -> None:
    render = helm.template(
        sets={"dashboards.enabled": "true", "dashboards.annotations.folder": "LLM"}
    )
    maps = [
        item for item in render.of("ConfigMap").values() if "dashboard" in item["metadata"]["name"]
    ]
    given = {name: json.loads(text) for item in maps for name, text in item["data"].items()}
    assert given == BOARDS
    for item in maps:
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert item["metadata"]["annotations"] == {"folder": "LLM"}
