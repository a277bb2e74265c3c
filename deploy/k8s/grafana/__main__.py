"""Writes the dashboards into the chart. Run it when a panel changes; a test says so."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.k8s.grafana.fleet import FLEET
from deploy.k8s.grafana.latency import LATENCY
from deploy.k8s.grafana.model import to_json
from deploy.k8s.grafana.workers import WORKERS

FOLDER = Path(__file__).parents[1] / "shoal" / "dashboards"
DASHBOARDS = (FLEET, WORKERS, LATENCY)


def render() -> dict[str, str]:
    """File names and what is in them."""
    return {
        f"{dashboard.uid}.json": json.dumps(to_json(dashboard), indent=2) + "\n"
        for dashboard in DASHBOARDS
    }


def main() -> None:
    """Rewrites the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
