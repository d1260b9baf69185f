"""The texts of `phaze help TOPIC`.

A text is for somebody who meets the words for the first time: what the thing is, how it is written, where to read on.
A line that begins with `$ ` is a command that can be typed. Which topic explains an error is said in `phaze.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phaze.errors import TOPIC_OF_WORD

__all__ = ["TOPICS", "Topic", "topic_of_option"]


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic: what it is about in a few words, and its text."""

    summary: str
    text: str


def _topic(summary: str, text: str) -> Topic:
    return Topic(summary, text.strip("\n"))


TOPICS: Mapping[str, Topic] = MappingProxyType(
    {
        "models": _topic(
            "what may stand for MODEL",
            """
A model is one of
  a known name                `phaze models` lists them, `phaze models llama` those with this text in the name
  a config.json               of Hugging Face, or the folder that it lies in
  an HLO or StableHLO file    or a folder that XLA (--xla_dump_to) or JAX (JAX_DUMP_IR_TO) dumped
  a saved graph               that `phaze import MODEL --out FILE` wrote
  python:FILE.py:NAME         what a name in your program holds: a torch module, a JAX loss, or a pair of
                              it and its inputs. This runs that program

$ phaze import gpt2-xl
$ phaze optimize python:train.py:model --cluster a100-80gb:8

The first command shows how a model was understood, the second plans one of your own. Operators without a
rule are priced and reported. In Python, `phaze.optimize(model, inputs)` takes live modules and functions.
""",
        ),
        "cluster": _topic(
            "how a cluster is written: CHIP:COUNT[@NETWORK]",
            """
  a100-80gb:8                 eight chips with the network that the chip usually has
  h100:512@nvlink8+ib400      nodes of 8 by NVLink, then a 400 Gb/s InfiniBand adapter for each device
  tpuv5p:512@8x8x8            a torus of the chip's own links; tpuv5p:8x8x8 is the same
  my-chip.json:64             a chip of your own (`phaze schema accelerator` says what the file holds)
  h100:8/host=25GB/s,200GiB   with what each device has of its host, for offloading the optimizer

Levels of a network stand innermost first, with + between. A count is a number of devices, not of nodes.

$ phaze chips
$ phaze cluster h100:512@nvlink8+ib400

The first command lists the chips with their memory, the second shows what was understood of a text. All
devices of a cluster are of one kind.
""",
        ),
        "strategy": _topic(
            "how a batch is divided: dp, tp, pp, cp, ep, zero and the rest",
            """
A strategy is a list of KEY=VALUE with commas between; what is left out is chosen for you.
  dp                  copies of the pipeline, each with its part of the batch
  tp                  devices that each layer's matrices are split over; it must divide the attention heads
  pp                  stages of the pipeline, and chunks, how many of them lie on each device
  schedule            order of passes: gpipe, 1f1b, interleaved-1f1b, zero-bubble; eager-1f1b in JAX;
                      zb-v and dualpipe-v, V shapes with both ends on one device, where you name them
  cp                  devices that each sequence is split over
  ep                  devices that experts are divided over; a divisor of dp x cp
  expert_tp           tp devices that each expert is cut over: tp, or 1 for whole experts on ep x tp devices
  zero, shard         ZeRO 0 to 3 (optimizer state, gradients, parameters), over how many of dp x cp
  micro_batch_size    sequences of a copy that run at once
  recompute           what backward computes again: none, selective, budget-75, -50, -25 (what pays) or full,
                      or a policy of MaxText, JAX, torchtitan or Megatron-LM by its name
  sequence_parallel   whether activations between layers are split over the tp devices
  stages              how many layers each stage has, such as stages=12+13+13+12
  offload             optimizer, activations or optimizer+activations: kept in the host's memory

dp x cp x tp x pp is the number of devices.

$ phaze evaluate gpt2-xl --cluster a100-80gb:8 --strategy dp=4,pp=2,zero=1

This prices a strategy and names the single change that helps most. `--from FILE` reads the strategy of a
torchtitan, Megatron, DeepSpeed, Accelerate or MaxText job.
""",
        ),
        "precision": _topic(
            "numbers and optimizers: what each parameter takes",
            """
--precision bf16 (default), bf16-cast, fp16, fp32, fp8, nvfp4, ...    what products are computed in
--optimizer adamw (default), sgd, muon, adafactor, lion, adam8bit, .. what states each parameter has

Mixed bf16 with Adam takes 18 bytes for each parameter: 2 for itself, 4 for its gradient, 12 for the master
copy and two states. ZeRO divides them over devices. A chip that lacks a type runs it no faster than one that
it has, and the plan says so. Casts and scales of fp8 and fp4 are not priced.
""",
        ),
        "memory": _topic(
            "whether a model fits, and what to do when it does not",
            """
A device holds parameters, gradients, optimizer states, activations that backward reads, a working set, and
what the framework keeps for itself. A stage is said to fit, to be marginal (within the error that measured
runs had) or to be over.

$ phaze fit llama3-8b --cluster a100-80gb:8 --global-batch 64

This says what is full, and which changes make it fit. By hand, in this order: zero=1 to 3 divide the
states, a smaller micro_batch_size and recompute=selective, budget-50 or full save activations, tp and pp
divide the model, cp divides long sequences, offload=optimizer or activations uses the host.
""",
        ),
        "objectives": _topic(
            "what a plan is to be best at: throughput, cost, energy or devices",
            """
--objective throughput   the shortest step on all devices (default)
--objective cost         money for a million tokens; needs --price, the money for one device-hour
--objective energy       joules for a token
--objective devices      the fewest devices whose step takes at most --step-time seconds

The last three use as many of the cluster's devices as serve them best.

$ phaze optimize gpt2-xl --cluster a100-80gb:64 --objective cost --price 2

`phaze search` has its own: throughput, throughput-per-area, throughput-per-energy.
""",
        ),
        "targets": _topic(
            "what runs a plan, and how a plan is written for it",
            """
--target auto (default) searches only what the model's own framework can run; --target NAME what that tool
can; --target none everything, as analysis that is not executable. What the restriction costs is printed.

$ phaze export --list
$ phaze optimize gpt2-xl --cluster a100-80gb:8 --target torchtitan --out plan.json
$ phaze export plan.json --target torchtitan -o job

The first command lists the targets, what each runs and how it was checked. The second plans for one, the
third writes its files. In Python, `plan.apply(model)` arranges a torch module or a JAX loss at once.
""",
        ),
        "calibration": _topic(
            "where prices come from, and how to fit them to your cluster",
            """
Chips are priced as ideal, or by a calibration that was fitted to published runs; every plan says which, and
where 80 % of comparable runs lie against their predictions. `phaze chips NAME` shows the sources.

$ phaze calibrate --measured steps.csv --out mine.json
$ phaze optimize gpt2-xl --cluster a100-80gb:8 --calibration mine.json

The first command fits prices to your measured steps, the second plans with them. steps.csv has the columns
model, cluster, global_batch and seconds, and may have the strategies of the runs. `--trace` fits to a trace
of torch.profiler instead.
""",
        ),
        "search": _topic(
            "which accelerator to build: spaces, journals, workers",
            """
$ phaze search bert-large --devices 1024 --journal search.jsonl

This finds the best of 29,360 designs with three memories each, with proof. `--space FILE` is a space of your
own (`phaze search --help` shows one), `--hbm` lists the memories in GiB, `--network` how devices are joined.
`--time-limit` and Ctrl-C end it with the best so far, and the same command goes on from its journal.
`--executor processes:4` takes four processes; `dask://HOST:PORT` a Dask cluster. Whoever runs a scheduler
can run programs on your machine: one on another machine needs --trust-scheduler.
""",
        ),
        "solvers": _topic(
            "linear solvers: which there are and when they matter",
            """
Plans need no solver by default: layers are sharded and scheduled by exact methods of their own. HiGHS, SCIP
and CP-SAT come with ortools, Gurobi with pip install 'phaze-plugin[gurobi]'; its bundled licence takes 2,000
variables. `--solver NAME` asks for one by name.

$ phaze doctor

This shows which solvers work here.
""",
        ),
        "files": _topic(
            "plans, journals and other files: what is checked, what is trusted",
            """
Plans, searches, journals, calibrations, graphs, clusters, chips and spaces are JSON with a version. They are
checked against their schema before anything of them is used, and none of them can run anything.

$ phaze schema plan
$ phaze verify plan.json --model gpt2-xl

The first command prints a schema, the second derives every number of a plan again. A file of another version
is refused: make it again with this one. A file that was cut short is refused, too; a journal goes on from
what is good of it.
""",
        ),
        "limits": _topic(
            "largest counts, time and memory of a command",
            """
More than 2^20 devices or sequences, 10,000 layers or files of 128 MiB are refused before work starts, because
they are usually a slip. If one is meant, raise it in the environment:

  PHAZE_LIMITS="devices=4194304,file_mib=1024"

--memory-limit GIB ends a command that takes more memory, --time-limit S one that takes longer, with its best
answer so far. Fewer values of --tp and --micro-batch-size make a question smaller.
""",
        ),
        "plugins": _topic(
            "packages that add models, chips, prices, solvers and targets",
            """
A plugin is an installed package with an entry point in the group `phaze` that names a module with hooks:
phaze_frontends, phaze_named_models, phaze_accelerators, phaze_networks, phaze_op_prices, phaze_solvers,
phaze_targets, phaze_stage_builders, phaze_worlds. `examples/plugin` in the repository is one to copy.

$ phaze doctor

This names every plugin, what it adds, from where it was loaded, and what failed in it. A plugin that fails
is passed over with a warning. Plugins run code: install those that you trust.
""",
        ),
        "errors": _topic(
            "how to read an error, and what to do with one",
            """
An error says what happened with which value, what was expected and what to do next; its last line may name a
topic. `--debug` shows where in the program it was raised. Exit codes: 0 fine, 1 an error, 2 wrong usage, 130
interrupted.

  FormatError, LimitError        phaze help files, phaze help limits
  ImportModelError               phaze help models
  HardwareError                  phaze help cluster
  QuestionError, PlacementError  an argument that cannot be; phaze help strategy
  ShardError                     a degree that does not divide something; phaze help strategy
  PluginError, SolverError       phaze help plugins, phaze help solvers

A traceback without --debug is a defect of Phaze: please report it with the command and `phaze doctor --json`.
""",
        ),
        "completion": _topic(
            "completion of commands, options and names in your shell",
            """
bash:  phaze completion bash > ~/.local/share/bash-completion/completions/phaze
zsh:   phaze completion zsh > ~/.zfunc/_phaze      (with `fpath+=~/.zfunc` before compinit in ~/.zshrc)
fish:  phaze completion fish > ~/.config/fish/completions/phaze.fish

It completes commands, options, models, chips, targets, precisions, topics and files. Names of models and
chips are those that were installed when the file was written: write it again after installing a plugin.
""",
        ),
    }
)
"""The topics by name, in the order in which they are listed."""


def topic_of_option(option: str) -> str | None:
    """The topic that explains what an option such as ``--cluster`` takes, or None where none does."""
    return TOPIC_OF_WORD.get(option.removeprefix("--").replace("-", "_"))
