"""Writes the output folder: files, record and diff, all or nothing."""
