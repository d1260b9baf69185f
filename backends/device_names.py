"""From what drivers call a device to what Phaze calls the chip."""

from __future__ import annotations

import re

from phaze.hardware import preset_names

__all__ = ["known_chip"]


def known_chip(device: str) -> str | None:
    """The preset whose name's parts all occur in a device's name, the longest one; None where there is none.

    >>> known_chip("NVIDIA A100-SXM4-80GB")
    'a100-80gb'
    """
    words = re.sub(r"[^a-z0-9]", "", device.casefold())
    fitting = [name for name in preset_names() if all(part in words for part in name.split("-"))]
    return max(fitting, key=len, default=None)
