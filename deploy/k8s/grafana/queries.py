"""PromQL that several panels have in common."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.k8s.grafana.model import Query

JOB = 'job="$job"'
WORKER = 'job="$job",instance=~"$instance"'
JOBS = "label_values(shoal_build_info, job)"

_QUANTILES = {"0.5": "median", "0.95": "95 %", "0.99": "99 %"}


def rate(metric: str, where: str = JOB, by: str = "") -> str:
    """What a counter grows by in a second, summed over `by`."""
    return f"sum{_by(by)} (rate({metric}{{{where}}}[$__rate_interval]))"


def total(metric: str, where: str = JOB, by: str = "") -> str:
    """A gauge, summed."""
    return f"sum{_by(by)} ({metric}{{{where}}})"


def quantiles(histogram: str, where: str = JOB) -> Sequence[Query]:
    """Median, 95th and 99th percentile of a histogram."""
    buckets = rate(f"{histogram}_bucket", where, "le")
    return [
        Query(f"histogram_quantile({quantile}, {buckets})", name)
        for quantile, name in _QUANTILES.items()
    ]


def mean(histogram: str, where: str = JOB, by: str = "") -> str:
    """A histogram's mean."""
    return f"{rate(f'{histogram}_sum', where, by)} / {rate(f'{histogram}_count', where, by)}"


def share(part: str, whole: str, where: str = JOB, by: str = "") -> str:
    """How much of one counter's growth is another's."""
    return f"{rate(part, where, by)} / {rate(whole, where, by)}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


# The share of first tokens that came later than the objective of the alerts.
LATE = (
    "1 - "
    + rate("shoal_gateway_time_to_first_token_seconds_bucket", f'{JOB},le="2.5"')
    + " / "
    + rate("shoal_gateway_time_to_first_token_seconds_count")
)
