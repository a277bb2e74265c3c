"""The Grafana dashboards, written to the chart by `python -m deploy.k8s.grafana`."""
