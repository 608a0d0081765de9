"""modeling_roberta.py, tensor parallel; rewrite.diff shows what changed."""
