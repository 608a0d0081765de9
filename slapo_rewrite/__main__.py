"""`python -m slapo_rewrite`."""

import sys

from slapo_rewrite.cli import main

sys.exit(main())
