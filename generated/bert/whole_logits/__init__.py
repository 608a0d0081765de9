"""modeling_bert.py, tensor parallel; rewrite.diff shows what changed."""
