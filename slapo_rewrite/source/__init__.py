"""Reads source files: classes, functions, imports, construction sites. Needs no torch."""
