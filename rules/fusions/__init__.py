"""The rules: computations and their replacements, one rule per file."""
