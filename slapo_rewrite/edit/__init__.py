"""Changes to source text: the only part that does so."""
