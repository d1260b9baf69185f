"""How many examples a property test tries: few by default, many where the profile asks for all of them."""

from hypothesis import settings


def examples(count: int) -> settings:
    """So many of every hundred examples that the profile asks of a test that says nothing."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))
