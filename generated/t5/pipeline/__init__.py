"""modeling_t5.py, tensor parallel; rewrite.diff shows what changed."""
