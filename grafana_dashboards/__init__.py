"""Grafana dashboards as code: what people see of a run, its incidents, its machines and of all runs."""
