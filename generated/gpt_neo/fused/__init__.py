"""modeling_gpt_neo.py, tensor parallel; rewrite.diff shows what changed."""
