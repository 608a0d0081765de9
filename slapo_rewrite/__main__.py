"""`python -m slapo_rewrite`."""

import sys

# Python searches the current folder first: a file there must not hide a module of the tool.
sys.path.append(sys.path.pop(0))

from slapo_rewrite.cli import main

sys.exit(main())
