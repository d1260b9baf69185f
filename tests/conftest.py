"""Profiles of the property tests: the same examples on every machine, and no deadline on a busy one.

Processes that pytest starts to share the work are told the terminal's width; tests print as where there is none.
"""

import os

from hypothesis import settings

os.environ.pop("COLUMNS", None)

settings.register_profile("phaze", derandomize=True, deadline=None, database=None, print_blob=False, max_examples=60)
settings.register_profile("full", parent=settings.get_profile("phaze"), max_examples=1000)
settings.load_profile("phaze")
