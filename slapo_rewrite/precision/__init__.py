"""Finds where values have to be cast if products are computed in half precision."""
