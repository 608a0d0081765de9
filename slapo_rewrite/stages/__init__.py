"""Pipeline stages: the model's own `forward`, written out and cut."""
