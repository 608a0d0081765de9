"""Schedule files: knobs, selections, and the primitive calls in their order."""
