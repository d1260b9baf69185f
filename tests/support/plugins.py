"""Plugins made on the spot, and distributions that importlib finds without an installation."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from phaze.hooks import Origin, PluginManager, hookimpl
from phaze.ir import Graph


def plugin_with(**hooks: Callable[[], object]) -> SimpleNamespace:
    """A plugin that implements the given hooks."""
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def manager_of(**plugins: object) -> PluginManager:
    """A manager with these plugins, the first one asked first; distributions are called after the plugins."""
    manager = PluginManager()
    for name, plugin in reversed(plugins.items()):
        manager.register(plugin, Origin(plugin=name, distribution=f"{name}-dist", version="1.0"))
    return manager


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises, whatever it is called with."""

    def function(*arguments: object, **keywords: object) -> Any:
        raise error

    return function


def graph_called(name: str) -> Graph:
    """A graph of nothing, to be told from another by its name."""
    return Graph(name=name, tensors={}, ops=(), outputs=())


@dataclass(frozen=True)
class SampleFrontend:
    """A frontend that accepts objects of one type and answers with what it was made with."""

    name: str
    accepted: type
    answer: Any
    libraries: Sequence[str] = ()
    options: Sequence[str] = field(default=("depth",))

    def accepts(self, model: object) -> bool:
        if isinstance(self.accepted, BaseException):
            raise self.accepted
        return isinstance(model, self.accepted)

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@contextmanager
def installed_distribution(
    folder: Path, name: str, *, version: str, entry_points: Mapping[str, str], modules: Mapping[str, str]
) -> Iterator[None]:
    """A distribution's metadata and modules, as an installer leaves them in a folder of sys.path, and gone again."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{plugin} = {target}\n" for plugin, target in entry_points.items())
    (metadata / "entry_points.txt").write_text(f"[phaze]\n{lines}")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in modules:
            sys.modules.pop(module, None)
