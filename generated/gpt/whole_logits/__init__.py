"""gpt.py, tensor parallel; rewrite.diff shows what changed."""
