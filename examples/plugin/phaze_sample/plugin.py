"""What this plugin adds: pyproject.toml names this module as entry point, and Phaze calls its hooks when needed."""

from collections.abc import Iterable, Mapping

from phaze.hardware import Accelerator, Fact, Network, NetworkLevel
from phaze.hooks import hookimpl
from phaze.interfaces import Frontend, ModelFactory, OpPricer, Target
from phaze_sample.launcher import ToyLauncher
from phaze_sample.shuffle import SHUFFLE, SHUFFLE_BACKWARD, price_shuffle
from phaze_sample.toy_format import ToyFrontend, tiny


@hookimpl
def phaze_frontends() -> Iterable[Frontend]:
    """A frontend for `.toy` files."""
    return [ToyFrontend()]


@hookimpl
def phaze_named_models() -> Mapping[str, ModelFactory]:
    """A model that needs no file."""
    return {"toy-tiny": tiny}


@hookimpl
def phaze_networks() -> Iterable[Network]:
    """One switch for all devices."""
    bandwidth, latency = Fact(1e9, "made up", is_verified=False), Fact(1e-6, "made up", is_verified=False)
    return [Network("toy-switch", "one switch", (NetworkLevel(None, bandwidth, latency),))]


@hookimpl
def phaze_accelerators() -> Mapping[str, Accelerator]:
    """A chip of one tensor core and one vector core."""
    return {
        "toy-chip": Accelerator(
            name="toy-chip",
            tensor_cores=1,
            tensor_rows=16,
            tensor_cols=16,
            vector_cores=1,
            vector_lanes=16,
            buffer_bytes=2**20,
            hbm_bytes=2**30,
            hbm_bandwidth_bytes_per_s=1e9,
            clock_hz=1e9,
        )
    }


@hookimpl
def phaze_op_prices() -> Mapping[str, OpPricer]:
    """A price for the one op of the toy format that Phaze does not know, and for its gradient."""
    return {SHUFFLE: price_shuffle, SHUFFLE_BACKWARD: price_shuffle}


@hookimpl
def phaze_targets() -> Iterable[Target]:
    """A target that runs no pipelines."""
    return [ToyLauncher()]
