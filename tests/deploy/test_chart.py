"""The chart's objects: what each must be for the fleet to find, probe and protect its pods."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.deploy.charts import BACKENDS, EXAMPLES, NAMESPACE, SERVICES, Helm, Render
from tests.deploy.validation import all_versions, schemas

