"""modeling_gpt2.py, tensor parallel; rewrite.diff shows what changed."""
