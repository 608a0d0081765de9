"""Predicts what a training step takes: its pipeline stages, their memory, its communication."""
