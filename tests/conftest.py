"""Profiles of the property tests: the same examples on every machine, and no deadline on a busy one.

Processes that pytest starts to share the work are told the terminal's width; tests print as where there is none.
"""

import os

from hypothesis import settings
from rare_collections import collect_rarely, keep_what_is_there

os.environ.pop("COLUMNS", None)

QUICK_COMPILER = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
"""Flags of XLA, here and in processes that tests start, with which small programs are compiled in half the time; what
they compute, keep and send is the same."""
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILER}".lstrip()

collect_rarely()


def pytest_collection_finish() -> None:
    """All test files, and so all frameworks, have been imported."""
    keep_what_is_there()


settings.register_profile("phaze", derandomize=True, deadline=None, database=None, print_blob=False, max_examples=40)
settings.register_profile("full", parent=settings.get_profile("phaze"), max_examples=1000)
settings.register_profile("quick", parent=settings.get_profile("phaze"), max_examples=10)
settings.load_profile("phaze")
