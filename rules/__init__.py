"""What the tool knows about models; installed as `slapo_rewrite.rules`."""
