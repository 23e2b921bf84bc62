"""Dashboards drawn without Grafana, from their JSON and a live Prometheus."""
