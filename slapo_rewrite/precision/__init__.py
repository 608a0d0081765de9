"""Which values change their precision where, when products are computed in half precision."""
