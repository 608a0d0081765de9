"""Pipeline stages: flattens the model's own `forward`, and cuts it."""
