"""From what drivers call a device to what Phaze calls the chip."""

from __future__ import annotations

import re

from phaze.hardware import preset_names

__all__ = ["known_chip"]


def known_chip(device: str) -> str | None:
    """The preset whose name's parts all occur in a device's name, the longest one; None where there is none.

    A host's own processor is no accelerator: a plan for it is made only where somebody asks.
    """
    words = re.sub(r"[^a-z0-9]", "", device.casefold().replace("lite", "e"))
    fitting = [name for name in preset_names() if name != "cpu" and all(part in words for part in name.split("-"))]
    return max(fitting, key=len, default=None)
