"""`python -m slapo_rewrite`."""

import sys

# Python looks into the current folder first: a model file there must not hide what the tool needs.
sys.path.append(sys.path.pop(0))

from slapo_rewrite.cli import main

sys.exit(main())
