"""A made-up launcher: it reads one line of numbers."""

from phaze.plan.plan import Plan
from phaze.targets import Capabilities


class ToyLauncher:
    """Writes the line that the launcher reads."""

    name = "toy-launcher"
    libraries = ()
    capabilities = Capabilities()

    def export(self, plan: Plan, model: object) -> dict[str, str]:
        """One file; the launcher needs no model."""
        return {"launch.toy": f"dp {plan.strategy.dp} tp {plan.strategy.tp}\n"}
