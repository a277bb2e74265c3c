"""The alerts: that they are complete, fire when they should, and say what the chart is told."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import CHART, ROOT, Helm, Render, RenderError

RULES = CHART / "files" / "rules.yaml"
CASES = yaml.safe_load(Path(__file__).with_name("alert_cases.yaml").read_text())
_HEADING = re.compile(r"^#+ (\w+)$", re.MULTILINE)


def _alerts(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


ALERTS = _alerts(yaml.safe_load(RULES.read_text())["groups"])


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool: apt-get install prometheus")
    return found


def _run(promtool: str, *arguments: str) -> None:
    done = subprocess.run(
        [promtool, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_to_do_and_has_a_case() -> None:
    sections = _HEADING.findall((ROOT / "docs" / "operations.md").read_text())
    anchors = {section.lower() for section in sections}
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        notes = rule["annotations"]
        assert notes["summary"].endswith("."), name
        assert notes["description"].endswith("."), name
        page, _, anchor = notes["runbook_url"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in anchors, f"{name} has no section"
    assert [case["alert"] for case in CASES] == list(ALERTS)


def test_alerts_fire_when_they_should_and_only_then(promtool: str, tmp_path: Path) -> None:
    tests = []
    for case in CASES:
        for kind, expected in (("fires", True), ("rests", False)):
            series = [line.rpartition("} ") for line in case[kind]]
            firing = f'ALERTS{{alertname="{case["alert"]}",alertstate="firing"}}'
            tests.append(
                {
                    "name": f"{case['alert']} {kind}",
                    "interval": "1m",
                    "input_series": [
                        {"series": f"{name}}}", "values": values} for name, _, values in series
                    ],
                    "promql_expr_test": [
                        {
                            "expr": f"count({firing}) > 0",
                            "eval_time": case["at"],
                            "exp_samples": [{"labels": "{}", "value": 1}] if expected else [],
                        }
                    ],
                }
            )
    path = tmp_path / "tests.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    _run(promtool, "test", "rules", str(path))


def _rendered(render: Render) -> list[dict[str, Any]]:
    (rule,) = render.of("PrometheusRule").values()
    groups: list[dict[str, Any]] = rule["spec"]["groups"]
    return groups


def test_the_charts_rules_are_the_releases_own(helm: Helm, promtool: str, tmp_path: Path) -> None:
    values = {
        "prometheusRule.enabled": "true",
        "prometheusRule.firstToken.seconds": "0.5",
        "prometheusRule.runbooks": "https://wiki/shoal",
        "prometheusRule.disabled": "{ShoalNoWorkerReady,ShoalBubbleHigh}",
    }
    objective = {"prometheusRule.firstToken.objective": "0.95"}
    groups = _rendered(helm.template(sets=values, json=objective))
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    _run(promtool, "check", "rules", str(path))
    text = path.read_text()
    assert 'job="llm/shoal"' in text
    assert 'job="shoal"' not in text
    assert 'le="0.5"' in text
    assert 'le="2.5"' not in text
    alerts = _alerts(groups)
    assert set(ALERTS) - set(alerts) == {"ShoalNoWorkerReady", "ShoalBubbleHigh"}
    assert "14.4 * (1 - 0.95)" in alerts["ShoalFirstTokenLateFast"]["expr"]
    link = alerts["ShoalErrors"]["annotations"]["runbook_url"]
    assert link == "https://wiki/shoal#shoalerrors"
    assert (
        "{{ $value | humanizePercentage }}" in alerts["ShoalErrors"]["annotations"]["description"]
    )


def test_the_objective_must_be_a_bucket_and_a_share(helm: Helm) -> None:
    for value in ('{"seconds": "2"}', '{"objective": 1}'):
        with pytest.raises(RenderError, match=r"firstToken"):
            helm.template(json={"prometheusRule.firstToken": value})


def test_the_monitors_name_targets_as_a_local_fleet_does(helm: Helm) -> None:
    render = helm.template(
        sets={f"{kind}.enabled": "true" for kind in ("podMonitor", "serviceMonitor")}
    )
    (by_pod,) = render.one("PodMonitor", "shoal")["spec"]["podMetricsEndpoints"]
    (by_service,) = render.one("ServiceMonitor", "shoal")["spec"]["endpoints"]
    assert by_pod == by_service
    assert by_pod["port"] == "admin"
    assert {rule["targetLabel"] for rule in by_pod["relabelings"]} == {
        "job",
        "instance",
        "component",
    }
    services = render.of("Service").values()
    admin = [s for s in services if "admin" in {port["name"] for port in s["spec"]["ports"]}]
    components = [s["metadata"]["labels"]["app.kubernetes.io/component"] for s in admin]
    assert sorted(components) == ["detokenizer", "gateway", "tokenizer", "worker"]  # each once
