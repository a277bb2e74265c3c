"""Checks rendered objects against schemas: Kubernetes' own, and small ones of custom resources.

Those of Kubernetes are in the package kubernetes-validate. They are compiled here, once a version
and kind, since that package reads a megabyte of definitions for every object.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

CUSTOM_SCHEMAS = {path.stem: path for path in Path(__file__).with_name("schemas").glob("*.json")}

Json = dict[str, Any]


class SchemaError(Exception):
    """An object is not what its schema says; the message names the object and the place."""


class Schemas:
    """The schemas of one Kubernetes version, for instance 1.33, where unknown fields are errors.

    Remembers what it has found valid: most objects of two renders are the same.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        self._directory = _schema_directory() / f"v{version}.0-local-strict"
        definitions = json.loads((self._directory / "_definitions.json").read_text())
        self._registry: Registry[Any] = Resource.from_contents(definitions) @ Registry()
        self._validators: dict[Path, Draft202012Validator] = {}
        self._valid: set[str] = set()

    def check(self, objects: Iterable[Json]) -> None:
        """Raises SchemaError for the first object that is wrong."""
        for item in objects:
            self._check(item)
            if item["kind"] == "LeaderWorkerSet":
                group = item["spec"]["leaderWorkerTemplate"]
                for name in ("leaderTemplate", "workerTemplate"):
                    named = {"metadata": {"name": f"{item['metadata']['name']}-{name.lower()}"}}
                    kind = {"apiVersion": "v1", "kind": "PodTemplate"}
                    self._check({**kind, **named, "template": group[name]})

    def _check(self, item: Json) -> None:
        text = json.dumps(item, sort_keys=True)
        if text in self._valid:
            return
        for error in self._validator(item).iter_errors(item):
            where = f"{item['kind']} {item['metadata']['name']}, Kubernetes {self._version}"
            raise SchemaError(f"{where}: {error.json_path}: {error.message}")
        self._valid.add(text)

    def _validator(self, item: Json) -> Draft202012Validator:
        kind = item["kind"].lower()
        path = CUSTOM_SCHEMAS.get(kind)
        if path is None:
            group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", item["apiVersion"])
            path = self._directory / f"{kind}-{group}.json"
        if path not in self._validators:
            schema = json.loads(path.read_text())
            self._validators[path] = Draft202012Validator(schema, registry=self._registry)
        return self._validators[path]


@functools.cache
def schemas(version: str) -> Schemas:
    """The schemas of a version, read once. Skips the test where the package is missing."""
    return Schemas(version)


def all_versions() -> list[str]:
    """Every version that the package has, oldest first."""
    names = (path.name for path in _schema_directory().iterdir())
    found = {
        match[1] for name in names if (match := re.match(r"v(\d+\.\d+)\.0-local-strict$", name))
    }
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def _schema_directory() -> Path:
    pytest.importorskip("kubernetes_validate")
    return Path(str(resources.files("kubernetes_validate"))) / "kubernetes-json-schema"
