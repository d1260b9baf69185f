"""What plugins implement: the protocols of frontends, targets, stage builders, op prices, named models and worlds.

Plugins, built-in ones included, hand objects of these shapes to the hooks in `phaze.hooks`. None of them may import a
framework before it is asked to do its work: `accepts` looks at type names and at what is already imported.
The remaining things that plugins add have their shape where they live: `phaze.hardware.Accelerator` and
`phaze.solvers.LinearSolver`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from phaze.cost import Estimate
    from phaze.hardware import AcceleratorArray
    from phaze.hooks import PluginManager
    from phaze.ir import Graph, Op
    from phaze.plan.plan import Plan
    from phaze.strategy_files import StrategyFile
    from phaze.targets import Capabilities

__all__ = [
    "FileTarget",
    "Frontend",
    "ModelFactory",
    "ModelFacts",
    "OpPricer",
    "RunnableTarget",
    "StageBuilder",
    "Target",
    "World",
]


@runtime_checkable
class Frontend(Protocol):
    """Turns one kind of model into a Graph."""

    @property
    def name(self) -> str:
        """What users pass as `frontend=`."""
        ...

    @property
    def libraries(self) -> Sequence[str]:
        """Modules that must be importable for this frontend to work; `phaze doctor` looks whether they are."""
        ...

    @property
    def options(self) -> Sequence[str]:
        """Names of the options that `import_model` understands; others are refused before it is called."""
        ...

    def accepts(self, model: object) -> bool:
        """Whether this is the kind of model that the frontend imports: quick, and without importing a framework."""
        ...

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Graph:
        """The model's graph; raises ImportModelError if it cannot be imported."""
        ...


@runtime_checkable
class ModelFactory(Protocol):
    """Builds the graph of a model that is known by name.

    A factory may have a method `forward` with the same argument, which gives the graph without its backward: planning
    asks for that one, because it derives the backward itself, behind fused attention. It may also have an attribute
    `also_called`, a tuple of further names that people have for the model.
    """

    def __call__(self, *, sequence_length: int | None) -> Graph:
        """The model's graph at this sequence length, or at its own default."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `phaze models` lists of a model: a factory that has a method `facts` says it.

    `active_parameters` are those that a token meets: of routed experts only the chosen ones.
    """

    family: str
    parameters: int
    active_parameters: int
    sequence_length: int


@runtime_checkable
class OpPricer(Protocol):
    """Prices one kind of op; it wins over the built-in price."""

    def __call__(self, graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        """What an op of the graph costs on each accelerator; the graph knows the shapes and types of its tensors."""
        ...


@runtime_checkable
class Target(Protocol):
    """The runtime that a plan is written for, and the code that writes it: a framework or a tool."""

    @property
    def name(self) -> str:
        """What users pass as `target=`."""
        ...

    @property
    def libraries(self) -> Sequence[str]:
        """Modules that must be importable for this target to work."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the target can run; a search for it stays inside."""
        ...

    def export(self, plan: Plan, model: object) -> object:
        """The plan in the target's own terms, as texts by file name: `plan.export` calls it.

        The model is None where the caller has none. Raises PlanError where the target writes no file, saying what
        to call instead.
        """
        ...


@runtime_checkable
class FileTarget(Target, Protocol):
    """A target that writes files for a tool, and reads the files that people have for it."""

    @property
    def tool(self) -> str:
        """The tool and the version that its capabilities are true of."""
        ...

    @property
    def checked(self) -> str:
        """What was done to check its files: parsed by which code, run on what."""
        ...

    def recognizes(self, name: str, text: str) -> bool:
        """Whether a file is one of this tool, by its name and its text."""
        ...

    def read(self, name: str, part: str | None, text: str, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy that a file says; `part` is the function of a Python file that is meant.

        Degrees that the tool leaves to the number of devices, and microbatches that it leaves to the batch, are
        settled. Raises FormatError where the file is damaged.
        """
        ...

    def edit(self, name: str, part: str | None, text: str, plan: Plan) -> tuple[str, str]:
        """A file that people have, as it is and with the settings of a plan; the rest of it stays."""
        ...


@runtime_checkable
class RunnableTarget(Target, Protocol):
    """A target that arranges a live model: `plan.apply` calls it."""

    @property
    def options(self) -> Sequence[str]:
        """Names of the options that `apply` understands; others are refused before it is called."""
        ...

    def apply(
        self,
        plan: Plan,
        model: object,
        *,
        mesh: object,
        loss_fn: object,
        plugins: PluginManager,
        options: Mapping[str, object],
    ) -> object:
        """The model, arranged as the plan says, on this mesh or (None) on one of its own.

        `plugins` know the stage builders. Raises PlanError where model or mesh are not those of the plan.
        """
        ...


@runtime_checkable
class SpecTarget(Target, Protocol):
    """A target that says a plan as specs of the user's own arrays: `plan.specs`, `mesh` and others call it."""

    def specs(self, plan: Plan, trees: Sequence[object]) -> Sequence[object]:
        """For every tree of arrays (parameters first) a tree of the same structure that says how each array lies."""
        ...

    def mesh(self, plan: Plan, *, explicit: bool = False) -> object:
        """The mesh that the specs speak of, with axes that are part of types (`explicit`) or the compiler's own."""
        ...

    def constraints(self, plan: Plan) -> Mapping[str, object]:
        """The specs of what lies between layers, by name."""
        ...

    def logical_axis_rules(self, plan: Plan, variables: object, activations: Sequence[str | None]) -> Sequence[object]:
        """Pairs of a name that the user gave to dimensions of arrays and of the mesh axes along which these lie."""
        ...


@runtime_checkable
class StageBuilder(Protocol):
    """Cuts one kind of model into pipeline stages, for a target that cannot do so by itself."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def target(self) -> str:
        """The name of the target that it serves."""
        ...

    def accepts(self, model: object) -> bool:
        """Whether this is the kind of model that it cuts: quick, and without importing a framework.

        Asked about a model and about its Graph: some kinds show what they are in the graph only.
        """
        ...

    def build_stages(self, model: object, stages: Sequence[Sequence[str]]) -> Sequence[object]:
        """What the target takes for stages; each stage lists the paths of its layers, in order.

        `torch` takes, for every stage but the first, the path of the module before whose call it begins; `jax` one part
        of the model per stage.
        """
        ...


@runtime_checkable
class World(Protocol):
    """The processes that a launcher started together, and the devices that this one sees.

    Nothing of it imports a framework: a framework that nobody imported has started no process group.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def size(self) -> int:
        """How many processes there are; 1 where no group was initialised."""
        ...

    def rank(self) -> int:
        """Which of them this one is."""
        ...

    def gather(self, text: str) -> Sequence[str]:
        """One text from every process, by rank, to every process."""
        ...

    def visible_devices(self) -> tuple[str, int] | None:
        """A known accelerator's name and how many of it all processes have together; None where it cannot be told."""
        ...
