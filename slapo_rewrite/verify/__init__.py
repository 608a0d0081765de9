"""Runs original and rewritten model side by side in real processes and compares their numbers."""
