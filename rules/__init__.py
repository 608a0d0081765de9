"""Fusion rules, schedules and measurements; installed as `slapo_rewrite.rules`."""
