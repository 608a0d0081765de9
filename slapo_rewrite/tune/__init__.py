"""Searches the space of a schedule's knobs by running the user's training command."""
