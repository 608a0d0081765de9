"""A schedule worked out from the model itself, as a file that a person can keep and edit."""
