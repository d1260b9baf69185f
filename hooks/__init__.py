"""The doors for plugins: the hooks that they implement, and the manager that finds and asks them.

A plugin is a module (or object) named by an entry point in group `phaze`; it implements any of the hooks in
`phaze.hooks.spec` with the `hookimpl` marker:

    from phaze.hooks import hookimpl

    @hookimpl
    def phaze_accelerators():
        return {"my-chip": Accelerator(...)}
"""

from phaze.hooks.manager import Offer, Origin, PluginFailure, PluginManager, Registry
from phaze.hooks.spec import hookimpl

__all__ = ["Offer", "Origin", "PluginFailure", "PluginManager", "Registry", "hookimpl"]
