"""Profiles of the property tests: the same examples on every machine, and no deadline on a busy one."""

from hypothesis import settings

settings.register_profile("phaze", derandomize=True, deadline=None, database=None, print_blob=False)
settings.register_profile("full", parent=settings.get_profile("phaze"), max_examples=1000)
settings.load_profile("phaze")
