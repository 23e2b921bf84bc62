"""Everything that speaks to Prometheus or Alertmanager. Never imports torch or `trainer_plugin`."""
