"""The texts of `phaze help TOPIC`.

A text is for somebody who meets the words for the first time: what the thing is, how it is written, where to read on.
A line that begins with `$ ` is a command that can be typed. Which topic explains an error is said in `phaze.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phaze.errors import TOPIC_OF_WORD

__all__ = ["TERMS", "TOPICS", "Topic", "topic_of_option"]


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic: what it is about in a few words, and its text."""

    summary: str
    text: str


def _topic(summary: str, text: str) -> Topic:
    return Topic(summary, text.strip("\n"))


TOPICS: Mapping[str, Topic] = MappingProxyType(
    {
        "plan": _topic(
            "how to read a printed plan, line by line",
            """
strategy   how the work is divided over the devices (`phaze help strategy`)
step       the time of one training step, and the throughput. MFU is the share of the chips' peak flops that
           the matrix products of the model use
of it      where the time goes on the device that ends last. Exposed communication is what no computation
           hides, bubble is waiting for other stages (`phaze help schedules`), update the optimizer's step
objective  what was made best, where it is not the throughput (`phaze help objectives`)
proof      how near the plan is to the best one (`phaze help proof`)
prices     where the predicted times come from, and where 80 % of comparable measured runs lie around their
           predictions (`phaze help calibration`); target: what can run the plan (`phaze help targets`)
on hosts   what is kept in the memory of the hosts (`phaze help recompute`)

The table has a row for each stage: its layers and devices, what it computes again, the time of one
microbatch, the memory of one device, the largest item of it, and whether it fits (`phaze help memory`).

$ phaze explain plan.json
$ phaze report plan.json --open

The first command says why the plan is as it is, the second shows it as a page.
""",
        ),
        "proof": _topic(
            "what is proven about a plan: bound, gap, slicing",
            """
A slicing is one choice of microbatch size, tp, cp and ep. The bound is a time that no plan of any slicing
that was offered can beat. The gap says by which part the plan takes longer than the bound:
  optimal          the gap is 0
  within 0.50 %    no plan is faster by more than this
  ended at 2 %     the search ended with a larger gap than was asked for (--gap)
  interrupted      the time was over (--time-limit, Ctrl-C): the best plan so far

The proof holds at the prices of the plan. It says nothing about how far prices are from measurements: the
line `prices` does. What was offered stands at the end of `phaze explain`.

$ phaze verify plan.json --model gpt2-xl

This computes the plan's numbers again, and proves its bound again, by separate and simpler code.
""",
        ),
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
        "zero": _topic(
            "what ZeRO shards, and over how many devices (hybrid sharding)",
            """
The copies of a model (dp x cp devices) need not each hold everything. ZeRO shards over them
  zero=0    nothing: every copy holds parameters, gradients and optimizer states
  zero=1    the optimizer states
  zero=2    the gradients too
  zero=3    the parameters too, which are gathered for every layer and microbatch (FSDP)

shard=N shards over groups of N neighbouring devices, and each group holds a whole copy (hybrid sharding,
HSDP). If N is the number of devices of a node, parameters are gathered inside of nodes only. shard=all
shards over all devices. A plan prints groups as `ZeRO-3 over 8 of 64`. A search tries them by itself.

$ phaze evaluate llama3-8b --cluster h100:64 --strategy dp=64,zero=3,shard=8 --alone
""",
        ),
        "schedules": _topic(
            "pipelines: the order of passes, chunks and the bubble",
            """
With pp stages, microbatches pass through all stages one after the other. The bubble is the time that a
device waits for other stages. The schedule says in which order a device runs its passes:
  gpipe              all forwards, then all backwards; every stage keeps all microbatches
  1f1b               one forward, one backward; a stage keeps at most as many microbatches as there are stages
  interleaved-1f1b   each device has several stages (chunks): a smaller bubble, more sends, more memory
  zero-bubble        gradients of weights are computed later and fill the bubble
  eager-1f1b         1f1b that starts forwards earlier, as JAX runs it
  zb-v, dualpipe-v   each device has one early and one late stage; priced only where you name them

$ phaze evaluate gpt2-xl --cluster a100-80gb:8 --strategy dp=2,pp=4,schedule=interleaved-1f1b,chunks=2 --alone

A small bubble needs many microbatches: a larger batch, a smaller micro_batch_size or a smaller dp.
""",
        ),
        "recompute": _topic(
            "activations: computed again in backward, or moved to the host",
            """
Forward keeps activations for backward. With recompute it keeps fewer, and backward computes the rest again:
  none        nothing is computed again
  selective   attention, whose activations are large and cheap to compute again
  budget-75, budget-50, budget-25   this part of the bytes is kept, chosen so that the rest is quickest
  full        a layer keeps only its input
Policies of MaxText, JAX, torchtitan and Megatron-LM are known by their names. One mode holds for all stages,
or write one for each: recompute=full+none,stages=7+7.

offload=activations moves what is kept to the memory of the host, offload=optimizer the optimizer's states.
The cluster must say what its hosts have. No target runs budgets or offload yet.

$ phaze evaluate llama3-8b --cluster h100:8 --strategy tp=8,recompute=budget-50 --alone
$ phaze optimize llama3-8b --cluster h100:8/host=25GB/s,200GiB --global-batch 64
""",
        ),
        "sequences": _topic(
            "long sequences: context parallelism (cp) and sequence parallelism",
            """
cp splits each sequence over cp devices. Only attention needs the whole sequence: keys and values are
gathered, passed around a ring, or exchanged so that each device has some heads. The fastest of these that
the target runs is taken. cp splits no parameters.

sequence_parallel splits the tensors between layers over the tp devices, but not inside of attention.

$ phaze optimize llama3-8b --cluster h100:64 --sequence-length 131072 --cp 1,2,4 --tp 8

--sequence-length sets the positions of a sequence; without it, a model has its own usual length.
""",
        ),
        "experts": _topic(
            "mixtures of experts: ep, expert_tp and imbalance",
            """
ep divides the experts of a layer over ep of the dp x cp devices. Tokens are sent to the devices of their
experts, and back. With ep=1 every device computes all experts.

expert_tp says what the tp devices do with experts: expert_tp=1 divides whole experts over ep x tp devices,
expert_tp=TP cuts each expert over the tp devices. A search takes what is faster.

$ phaze evaluate mixtral-8x7b --cluster h100:64 --strategy ep=8,tp=1,pp=1 --alone

Experts are assumed to get equal shares of the tokens. --expert-imbalance 1.3 prices them as if each got 1.3
times its share.
""",
        ),
        "precision": _topic(
            "numbers and optimizers: what each parameter takes",
            """
--precision bf16 (default), bf16-cast, fp16, fp32, fp8, nvfp4, ...    what products are computed in
--optimizer adamw (default), sgd, muon, adafactor, lion, adam8bit, .. what states each parameter has

Mixed bf16 with Adam takes 18 bytes for each parameter: 2 for itself, 4 for its gradient, 12 for the master
copy and two states. ZeRO divides them over devices. A chip without a type computes it at the speed of another
type, and the plan says so. Casts and scales of fp8 and fp4 are not priced.
""",
        ),
        "memory": _topic(
            "whether a model fits, and what to do when it does not",
            """
A device holds parameters, gradients, optimizer states, activations that backward reads, a working set, and
what the framework keeps for itself. A stage fits, is marginal (it fits only by using memory that should stay
free, because measured runs needed more than was predicted), or is over.

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

The last three also choose how many of the cluster's devices to use.

$ phaze optimize gpt2-xl --cluster a100-80gb:64 --objective cost --price 2

`phaze search` has its own: throughput, throughput-per-area, throughput-per-energy.
""",
        ),
        "targets": _topic(
            "what runs a plan, and how a plan is written for it",
            """
--target auto (default) searches only what the model's own framework can run; --target NAME what that tool
can; --target none searches everything, for an analysis that cannot be run. If the best plan without the
restriction is faster, that is printed.

$ phaze export --list
$ phaze optimize gpt2-xl --cluster a100-80gb:8 --target torchtitan --out plan.json
$ phaze export plan.json --target torchtitan -o job

The first command lists the targets, what each runs and how it was checked. The second plans for one, the
third writes its files. In Python, `plan.apply(model)` arranges a torch module or a JAX loss at once.
""",
        ),
        "torch": _topic(
            "running a plan in torch: plan.apply(module)",
            """
import torch, phaze
torch.distributed.init_process_group("nccl")             # in every process of a launch by torchrun
plan = phaze.optimize(model, batch, cluster="h100:8", global_batch_size=64)
run = plan.apply(model, inputs=batch, optimizer=torch.optim.AdamW)
loss = run.step(**run.share(batch))                      # the mean loss of the whole batch

Plan the module itself, not its name: plans of names are analysis only. Launch as many processes as the plan
has devices, with equal weights in all of them. If the module returns no loss, pass loss_fn= and targets=.
`run.share` cuts a batch for this process; the batch need not have the planned number of samples.

run.save and run.load write and read checkpoints, which any other plan of the model can read. run.profile
compares the parts of a step with the plan.
""",
        ),
        "jax": _topic(
            "running a plan in JAX: plan.apply(loss), plan.specs",
            """
import jax, phaze
plan = phaze.optimize(loss, (params, x, y), cluster="tpuv5p:8", global_batch_size=64)
run = plan.apply(loss, inputs=(params, x, y))
state = run.start(params)
state, value = run.step(state, x, y)

Plan the loss function itself. It is a mean or a sum over samples, or over tokens that a mask counts, and
samples do not depend on each other. Modules of flax and whole train steps are taken, too. JAX must see as
many devices as the plan has; on a host, jax.config.update("jax_num_cpu_devices", 8) makes eight.

For a jit of your own, plan.mesh() is the mesh and plan.specs(params, x, y) are the shardings.
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
own (`phaze search --help` shows one), `--hbm` lists the memories in GiB, `--network` says how devices are
joined. `--time-limit` and Ctrl-C end it with the best so far. The same command goes on from its journal.
`--executor processes:4` takes four processes; `dask://HOST:PORT` a Dask cluster. Whoever runs a scheduler
can run programs on your machine: one on another machine needs --trust-scheduler.
""",
        ),
        "solvers": _topic(
            "linear solvers: which there are and when they matter",
            """
Plans need no solver by default: layers are sharded and scheduled by exact methods of their own. HiGHS, SCIP
and CP-SAT come with ortools, Gurobi with pip install 'phaze-plugin[gurobi]'; its bundled licence solves
problems of up to 2,000 variables. `--solver NAME` asks for one by name.

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
is refused: make it again with this one. A file that was cut off is refused, too. Of a damaged journal, the
part before the damage is used.
""",
        ),
        "limits": _topic(
            "largest counts, time and memory of a command",
            """
More than 2^20 devices or sequences, 10,000 layers or files of 128 MiB are refused before work starts, because
they are usually a mistake. If you mean one of them, raise the limit in the environment:

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


TERMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("step", "mfu", "compute", "exposed", "update", "energy", "stage", "layers"), "plan"),
        **dict.fromkeys(("bound", "gap", "slicing", "optimal"), "proof"),
        **dict.fromkeys(("dp", "tp", "pp", "microbatch", "micro_batch_size", "stages"), "strategy"),
        **dict.fromkeys(("shard", "hsdp", "fsdp", "hybrid"), "zero"),
        **dict.fromkeys(("bubble", "chunks", "pipeline", "1f1b", "gpipe"), "schedules"),
        **dict.fromkeys(("offload", "host", "hosts", "checkpointing", "budget", "selective"), "recompute"),
        **dict.fromkeys(("cp", "context", "sequence", "sequence_parallel", "sequence_length", "ring"), "sequences"),
        **dict.fromkeys(("ep", "expert_tp", "moe", "mixture", "imbalance"), "experts"),
        **dict.fromkeys(("fits", "marginal", "over", "activations", "working", "buffers", "reserved"), "memory"),
        **dict.fromkeys(("parameters", "gradients"), "memory"),
        **dict.fromkeys(("optimizer", "bf16", "fp8"), "precision"),
        **dict.fromkeys(("prices", "ideal", "fitted"), "calibration"),
        **dict.fromkeys(("throughput", "devices"), "objectives"),
        **dict.fromkeys(("network", "accelerator", "host_memory"), "cluster"),
        **dict.fromkeys(("target", "apply"), "targets"),
        **dict.fromkeys(("model", "lora", "hlo", "config"), "models"),
    }
)
"""Words of printed plans and of strategies, and the topic that explains each."""


def topic_of_option(option: str) -> str | None:
    """The topic that explains what an option such as ``--cluster`` takes, or None where none does."""
    return TOPIC_OF_WORD.get(option.removeprefix("--").replace("-", "_"))
