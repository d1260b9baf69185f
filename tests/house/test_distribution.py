"""What is built holds everything and nothing else, installs anywhere, and finds plugins installed beside it."""

import shutil
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import doctor, empty_environment, environment_with_our_dependencies, install_without_network, run
from repository import ROOMS, ROOT, tracked_files

import phaze

SAMPLE = ROOT / "examples" / "plugin"
TRACKED = [path.relative_to(ROOT) for path in tracked_files()]


@dataclass(frozen=True)
class Built:
    source: Path
    wheel: Path


def copy_of_the_repository(folder: Path) -> Path:
    for path in TRACKED:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source distribution, and the wheel built from it, of a clean copy."""
    folder = tmp_path_factory.mktemp("built")
    source = copy_of_the_repository(folder / "source")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source)
    (archive,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Built(archive, wheel)


@pytest.fixture(scope="module")
def python_with_phaze(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = environment_with_our_dependencies(tmp_path_factory.mktemp("environment"))
    install_without_network(python, built.wheel)
    return python


@pytest.fixture(scope="module")
def python_with_sample(python_with_phaze: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(SAMPLE, tmp_path_factory.mktemp("sample") / "source")
    install_without_network(python_with_phaze, copy)
    return python_with_phaze


def test_the_wheel_holds_exactly_the_rooms_under_one_name(built: Built) -> None:
    packed = {name for name in zipfile.ZipFile(built.wheel).namelist() if ".dist-info/" not in name}
    expected = {
        "/".join([*ROOMS[path.parts[0]].split("."), *path.parts[1:]]) for path in TRACKED if path.parts[0] in ROOMS
    }
    assert packed == expected


def test_the_source_distribution_holds_every_file_of_the_repository(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        packed = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert set(TRACKED) - packed == set()


def test_the_installed_wheel_diagnoses_itself(python_with_phaze: Path) -> None:
    document = doctor(python_with_phaze)
    assert document["phaze"] == phaze.__version__
    assert document["problems"] == []
    origins = [plugin["origin"] for plugin in document["plugins"] if plugin["origin"]["plugin"] == "core"]
    assert [Path(origin["file"]).is_relative_to(python_with_phaze.parent.parent) for origin in origins] == [True]


def test_the_sample_plugin_is_found_where_it_is_installed(python_with_sample: Path) -> None:
    document = doctor(python_with_sample)
    plugin = document["plugins"][0]
    assert (plugin["origin"]["distribution"], plugin["origin"]["version"]) == ("phaze-sample", "1.2.3")
    assert Path(plugin["origin"]["file"]).is_relative_to(python_with_sample.parent.parent)
    kinds = ("accelerators", "frontends", "named_models", "networks", "op_prices", "targets")
    assert plugin["hooks"] == [f"phaze_{kind}" for kind in kinds]
    for kind, name in {
        "frontends": "toy",
        "accelerators": "toy-chip",
        "networks": "toy-switch",
        "op_prices": "toy_shuffle",
        "named_models": "toy-tiny",
        "targets": "toy-launcher",
    }.items():
        parts = [part for part in document[kind] if part["name"] == name]
        assert [part["origin"]["plugin"] for part in parts] == ["sample"]
    assert document["problems"] == []


def test_the_sample_plugins_frontend_imports_its_made_up_format(python_with_sample: Path, tmp_path: Path) -> None:
    (tmp_path / "network.toy").write_text("input 64\ndense 128\nshuffle\ndense 10\n")
    (tmp_path / "broken.toy").write_text("input 64\ndense many\n")
    program = """
import phaze
graph = phaze.import_graph("network.toy")
print(graph.name, graph.parameter_count, phaze.import_graph("toy-tiny").parameter_count)
try:
    phaze.import_graph("broken.toy")
except phaze.PhazeError as error:
    print(error)
"""
    told = run(python_with_sample, "-c", program, folder=tmp_path).splitlines()
    assert told == [
        f"network {64 * 128 + 128 * 10} {64 * 128 + 128 * 10}",
        "toy network: 'dense many'; expected 'input N', 'dense N' or 'shuffle'.",
    ]


def test_the_sample_plugins_price_is_used_on_its_accelerator(python_with_sample: Path) -> None:
    program = """
import phaze
from phaze.cost import plugin_prices, price_ops
from phaze.hardware import find_accelerator
from phaze.hooks import PluginManager
graph = phaze.import_graph("toy-tiny")
shuffles = [op for op in graph.ops if op.function == "toy_shuffle"]
plugins = PluginManager.load()
chip, prices = find_accelerator("toy-chip", plugins), plugin_prices(plugins)
print(*price_ops(graph, shuffles, chip, prices=prices).core_s.ravel())
"""
    read_and_written_bytes, slowdown, bandwidth_bytes_per_s = 2 * 2 * 128, 3.0, 1e9
    seconds = [float(text) for text in run(python_with_sample, "-c", program).split()]
    assert seconds == pytest.approx([slowdown * read_and_written_bytes / bandwidth_bytes_per_s])


def test_the_sample_plugins_target_is_planned_for_and_exported_to(python_with_sample: Path, tmp_path: Path) -> None:
    program = """
import phaze
plan = phaze.optimize("toy-tiny", cluster="toy-chip:2", global_batch_size=4, target="toy-launcher")
print(plan.provenance.target, plan.strategy.pp, plan.export("toy-launcher"))
plan.save("plan.json")
"""
    told = run(python_with_sample, "-c", program, folder=tmp_path)
    assert told.split("{")[0] == "toy-launcher 1 "
    command = ("-m", "phaze", "export", "plan.json", "--target", "toy-launcher", "-o", "out")
    run(python_with_sample, *command, folder=tmp_path)
    written = (tmp_path / "out" / "launch.toy").read_text()
    assert written.startswith("dp ")
    assert repr(written) in told


@pytest.mark.exhaustive
def test_the_wheel_installs_into_an_empty_environment(built: Built, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "environment")
    constraints = ROOT / "tests" / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, built.wheel)
    document = doctor(python)
    assert document["problems"] == []
    assert {"highs", "scip", "cp-sat"} <= {row["name"] for row in document["solvers"] if row["state"] == "works"}


@pytest.mark.exhaustive
def test_an_editable_installation_works(tmp_path: Path) -> None:
    source = copy_of_the_repository(tmp_path / "source")
    python = empty_environment(tmp_path / "environment")
    run(python, "-m", "pip", "install", "--quiet", "--editable", source)
    assert doctor(python)["problems"] == []


@pytest.mark.exhaustive
def test_make_run_sets_itself_up_once(tmp_path: Path) -> None:
    source = copy_of_the_repository(tmp_path / "source")
    assert "installing phaze" in run("make", "run", folder=source)
    assert "installing phaze" not in run("make", "run", folder=source)
