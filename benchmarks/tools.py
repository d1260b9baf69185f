"""Files for tools, by the tools' own code: plans are exported, and the real packages parse them and build their meshes.

    python benchmarks/tools.py [--environment DIR] [--only NAME]

The packages are installed by pip into two environments of their own (about 0.9 GB with triton, which torchtitan
imports, and 40 MB for MaxText), beside this one's torch and jax, and left in DIR where one is given. What each check
does stands in `tool_checks.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import phaze
from phaze.backends.tools.tool_target import block_counts
from phaze.installed import installed_plugins
from phaze.plan.plan import Plan

PACKAGES = (
    *("torchtitan==0.3.0", "torchao==0.18.0", "megatron-core==0.16.1", "megatron-bridge==0.3.1", "accelerate==1.15.0"),
    *(
        "lightning==2.6.6",
        "pytorch-lightning==2.6.6",
        "lightning-utilities",
        "torchmetrics",
        "tyro",
        "docstring_parser",
    ),
    *("shtab", "typeguard", "spmd_types==0.2.3", "torchdata", "torch_checkpointing", "einops", "hjson", "py-cpuinfo"),
    *("datasets<4.8", "pyarrow", "dill", "multiprocess", "xxhash", "aiohttp", "aiosignal", "frozenlist", "multidict"),
    *("yarl", "propcache", "aiohappyeyeballs", "requests", "urllib3", "certifi", "charset-normalizer", "pillow"),
    *(
        "tensorboard",
        "tensorboard-data-server",
        "werkzeug",
        "grpcio",
        "markdown",
        "httpx",
        "httpcore",
        "triton",
        "ninja",
    ),
)
"""The tools and what they import, without their dependencies: torch is this environment's own."""
DEEPSPEED = "deepspeed==0.19.8"
"""It is built from its source, which needs a current setuptools and no isolation; its kernels are not built."""

MAXTEXT_PACKAGES = (
    *("maxtext==0.2.3", "omegaconf==2.4.0", "pathwaysutils", "fastapi", "starlette"),
    *("opentelemetry-api", "importlib-metadata", "zipp", "requests", "urllib3", "certifi", "charset-normalizer"),
    *(
        "uvicorn",
        "aqtp==0.9.0",
        "qwix==0.1.8",
        "tokamax==0.0.12",
        "jaxtyping",
        "einshape",
        "typeguard==2.13.3",
        "grain",
    ),
    *("portpicker", "array_record", "pillow", "tiktoken", "sentencepiece"),
)
"""MaxText 0.2.3, the last one for this environment's jax that runs on Python 3.11, and what its models import."""

STRATEGIES: dict[str, list[dict[str, Any]]] = {
    "torchtitan": [
        {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "schedule": "1f1b", "recompute": "full", "sequence_parallel": True},
        {"dp": 4, "tp": 2, "pp": 1, "zero": 2, "recompute": "products", "sequence_parallel": True},
        {"dp": 2, "cp": 2, "tp": 2, "pp": 1, "zero": 3, "recompute": "full", "sequence_parallel": True},
        {"dp": 8, "shard": 4, "tp": 1, "pp": 1, "zero": 3, "recompute": "full", "precision": "fp8"},
        {"dp": 8, "ep": 2, "tp": 1, "pp": 1, "zero": 3, "recompute": "none"},
    ],
    "megatron-lm": [
        {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "schedule": "1f1b", "recompute": "full", "stages": [2, 4]},
        {"dp": 4, "tp": 1, "pp": 2, "zero": 0, "schedule": "interleaved-1f1b", "chunks": 2, "recompute": "selective"},
        {"dp": 4, "cp": 2, "tp": 1, "pp": 1, "zero": 1, "recompute": "none", "precision": "fp8"},
        {"dp": 8, "shard": 4, "tp": 1, "pp": 1, "zero": 1, "recompute": "none"},
        {"dp": 4, "ep": 2, "tp": 2, "pp": 1, "zero": 1, "recompute": "none", "sequence_parallel": True},
        {"dp": 4, "tp": 2, "pp": 1, "zero": 1, "recompute": "none", "sequence_parallel": False},
    ],
    "megatron-bridge": [{"dp": 2, "tp": 2, "pp": 2, "zero": 1, "schedule": "1f1b", "recompute": "full"}],
    "deepspeed": [
        *({"dp": 2, "tp": 1, "pp": 1, "zero": zero, "recompute": "none"} for zero in (1, 2, 3)),
        {"dp": 2, "tp": 2, "pp": 1, "zero": 2, "recompute": "full", "sequence_parallel": False},
        {"dp": 2, "cp": 2, "tp": 1, "pp": 1, "zero": 3, "recompute": "none"},
        {"dp": 2, "tp": 1, "pp": 2, "zero": 1, "schedule": "1f1b", "recompute": "full"},
    ],
    "accelerate": [
        {"dp": 4, "tp": 1, "pp": 1, "zero": 3, "recompute": "none"},
        {"dp": 4, "shard": 2, "tp": 1, "pp": 1, "zero": 3, "recompute": "none"},
        {"dp": 2, "cp": 2, "tp": 1, "pp": 1, "zero": 2, "recompute": "none"},
    ],
    "lightning": [{"dp": 4, "tp": 1, "pp": 1, "zero": 3, "recompute": "full"}],
    "maxtext": [
        {"dp": 4, "cp": 2, "tp": 1, "pp": 1, "zero": 3, "recompute": "full"},
        {"dp": 2, "tp": 4, "pp": 1, "zero": 3, "recompute": "dots", "sequence_parallel": True},
        {"dp": 8, "shard": 4, "tp": 1, "pp": 1, "zero": 3, "recompute": "full"},
        {"dp": 4, "tp": 1, "pp": 2, "zero": 0, "schedule": "gpipe", "recompute": "full"},
        {"dp": 8, "ep": 2, "tp": 1, "pp": 1, "zero": 3, "recompute": "full"},
    ],
    "torchrun": [{"dp": 2, "tp": 2, "pp": 2, "zero": 1, "schedule": "1f1b", "recompute": "full"}],
}
"""What is exported for each tool: its axes together on eight devices, or four."""

MODEL = {
    "model_type": "megatron-gpt",
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 1024,
}


MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
"""For strategies that divide experts."""


def environment(folder: Path, packages: Sequence[str], built: Sequence[str] = ()) -> Path:
    """The Python of an environment with these packages, the last ones built here; it also sees this one's packages."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    venv.create(folder, with_pip=True)
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    here = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    # `addsitedir` reads the other environments' own path files, editable installs among them.
    (site / "beside.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "setuptools", "wheel"], check=True)
    # MaxText names Python 3.12; what is run of it here needs no more than 3.11.
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", *packages], check=True)
    if built:
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", *built], check=True)
    return python


def environment_for(name: str, folder: Path) -> Path:
    """The Python that has a tool: MaxText has an environment of its own, because it asks for other versions."""
    if name == "maxtext":
        return environment(folder / "maxtext", MAXTEXT_PACKAGES)
    return environment(folder / "torch", PACKAGES, (DEEPSPEED,))


def planned(strategy: dict[str, Any]) -> Plan:
    """The price of a strategy on a small GPT and as many A100s as it needs."""
    devices = strategy["dp"] * strategy.get("cp", 1) * strategy["tp"] * strategy["pp"]
    chosen = {"micro_batch_size": 2, **strategy}
    precision = chosen.pop("precision", "bf16")
    model = MIXTURE if strategy.get("ep", 1) > 1 else MODEL
    question: dict[str, Any] = {"cluster": f"a100-80gb:{devices}", "global_batch_size": 64, "precision": precision}
    return phaze.evaluate(model, strategy=chosen, compares=False, target=None, sequence_length=256, **question).plan


def expected(plan: Plan) -> dict[str, Any]:
    """What a tool must make of a plan's files."""
    strategy = plan.strategy
    shards = strategy.shard_devices // strategy.cp if strategy.zero else 1
    mesh = {
        "pp": strategy.pp,
        "dp_replicate": strategy.dp // shards,
        "dp_shard": shards,
        "cp": strategy.cp,
        "tp": strategy.tp,
    }
    return {
        "devices": plan.cluster.device_count,
        "mesh": mesh,
        "zero": strategy.zero,
        "ep": strategy.ep,
        "is_fp8": plan.question.precision.quantizes_products,
        "chunks": strategy.chunks,
        "blocks": plan.model.layers - 2,
        "stage_blocks": block_counts(plan, "the check"),
        "micro_batch_size": strategy.micro_batch_size,
        "micro_batches": plan.micro_batches,
        "global_batch_size": plan.question.global_batch_size,
    }


def check(python: Path, name: str, strategy: dict[str, Any]) -> tuple[str, ...] | None:
    """Export one plan, run its check, and print what it showed; None where it failed."""
    with tempfile.TemporaryDirectory() as text:
        folder, plan = Path(text), planned(strategy)
        plan.save(folder / "plan.json")
        for file, content in plan.export(name).items():
            (folder / file).write_text(content)
        (folder / "expected.json").write_text(json.dumps(expected(plan)))
        program = Path(__file__).with_name("tool_checks.py")
        done = subprocess.run([python, program, folder, name], capture_output=True, text=True)
    is_fine = done.returncode == 0
    told = json.loads(done.stdout.strip().splitlines()[-1]) if is_fine else done.stderr.strip().splitlines()[-8:]
    print(f"{'ok  ' if is_fine else 'FAIL'} {name}: {strategy}\n     " + "\n     ".join(told), flush=True)
    return tuple(told) if is_fine else None


def holds(python: Path, name: str) -> list[bool]:
    """Whether each check of a tool holds, and whether together they show what `phaze export --list` says."""
    shown = [check(python, name, strategy) for strategy in STRATEGIES[name]]
    said = installed_plugins().targets().get(name).checked
    claims = {claim for claim in said.split("; ") if not claim.startswith("not ")}
    differing = claims ^ {claim for claims_of_one in shown for claim in claims_of_one or ()}
    if differing:
        print(f"FAIL {name}: said and shown differ: {differing}", flush=True)
    return [*(claims_of_one is not None for claims_of_one in shown), not differing]


def main() -> int:
    """Check every tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--environment", type=Path, help="where the tools are, or are to be, installed")
    parser.add_argument("--only", choices=sorted(STRATEGIES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tools = arguments.environment or Path(folder)
        names = [arguments.only] if arguments.only else list(STRATEGIES)
        results = [result for name in names for result in holds(environment_for(name, tools), name)]
    print(f"{sum(results)} of {len(results)} checks hold")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
