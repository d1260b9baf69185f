"""Train a small GPT, written in plain torch, with the plan that Phaze finds for the processes of a launch.

On this machine:        torchrun --nproc-per-node 2 examples/torch_nanogpt.py
On eight GPUs, larger:  torchrun --nproc-per-node 8 examples/torch_nanogpt.py \
                            --layers 24 --width 2048 --heads 16 --length 1024 --batch 256 --steps 1000 --text book.txt

The model knows nothing of Phaze and holds no parallel code: copy `main` and put your own module in the place of `GPT`.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import phaze


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention over the sequence, then the perceptron at every place."""
        batch, length, width = x.shape
        y = self.norm_1(x)
        query, key, value = (
            project(y).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder that returns its mean loss, which is what a plan trains."""

    def __init__(self, *, words: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each next letter."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Plan once for all processes, then train as the plan says."""
    arguments = read_arguments()
    has_gpus = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if has_gpus else "gloo")
    rank = torch.distributed.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)

    text = torch.tensor(list(Path(arguments.text).read_bytes()), dtype=torch.long)
    torch.manual_seed(0)  # equal weights and equal batches in every process
    model = GPT(
        words=256,
        length=arguments.length,
        layers=arguments.layers,
        width=arguments.width,
        heads=arguments.heads,
    ).to(device)
    batch = random_batch(text, arguments, device)

    # GPUs are found by their names where no cluster is given. Rank 0 plans, the others receive its plan.
    plan = phaze.optimize(
        model,
        batch,
        cluster=None if has_gpus else f"cpu:{torch.distributed.get_world_size()}",
        global_batch_size=arguments.batch,
        precision="bf16" if has_gpus else "fp32",
    )
    if rank == 0:
        print(plan)
    run = plan.apply(model, inputs=batch, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=arguments.rate))

    for step in range(arguments.steps):
        # Every process draws the same global batch; `share` takes the part that is this process's own.
        loss = run.step(**run.share(random_batch(text, arguments, device)))
        if rank == 0 and step % max(1, arguments.steps // 10) == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    loss = run.evaluate(**run.share(batch))
    if rank == 0:
        print(f"after {arguments.steps} steps: loss {loss.item():.3f} on the first batch")
    torch.distributed.destroy_process_group()


def random_batch(text: torch.Tensor, arguments: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """Pieces of the text and, one place further, what is to be predicted."""
    starts = torch.randint(len(text) - arguments.length - 1, (arguments.batch, 1))
    pieces = text[starts + torch.arange(arguments.length + 1)].to(device)
    return {"ids": pieces[:, :-1], "targets": pieces[:, 1:]}


def read_arguments() -> argparse.Namespace:
    """The sizes; the defaults take seconds on a laptop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="letters of a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, over all processes")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate")
    parser.add_argument("--text", default=__file__, help="a file to learn, letter by letter (default: this program)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
