"""Schedules that ship with the tool, one model family a file."""
