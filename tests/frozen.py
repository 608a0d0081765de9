"""Imported last by the process from which ranks are forked.

What that has imported is left out of garbage collection from then on: a rank that collects would
otherwise touch, and so copy, all of it.
"""

import gc

gc.collect()
gc.freeze()
