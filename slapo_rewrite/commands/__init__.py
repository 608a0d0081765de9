"""The commands: options -> calls -> an exit code."""
