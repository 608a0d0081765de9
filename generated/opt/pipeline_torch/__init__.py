"""modeling_opt.py, tensor parallel; rewrite.diff shows what changed."""
