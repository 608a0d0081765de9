"""modeling_albert.py, tensor parallel; rewrite.diff shows what changed."""
