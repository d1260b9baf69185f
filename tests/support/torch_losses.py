"""Losses as people write them, of a small model: those that treat samples apart, and those that do not."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

WORDS, WIDTH = 32, 16
Loss = Callable[["Scored", dict[str, torch.Tensor]], torch.Tensor]
APART: dict[str, Loss] = {}
MIXING: dict[str, Loss] = {}


class Block(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


class Scored(torch.nn.Module):
    """A model of words that is given its loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)
        self.blocks = torch.nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(2))
        self.loss = loss

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        rejected: torch.Tensor,
    ) -> torch.Tensor:
        batch = {"input_ids": input_ids, "labels": labels, "weights": weights, "chosen": chosen, "rejected": rejected}
        return self.loss(self, batch)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.hidden(ids))
        return result

    def token_losses(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(ids).transpose(1, 2), labels, reduction="none")

    def mean_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.logits(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return -self.token_losses(ids, ids).sum(1)

    def vectors(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hidden(ids).mean(1)


def scored_batch(size: int = 8, length: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = ("input_ids", "labels", "chosen", "rejected")
    batch = {name: torch.randint(0, WORDS, (size, length), generator=generator) for name in names}
    return batch | {"weights": torch.rand(size, generator=generator) + 0.5}


def apart(loss: Loss) -> Loss:
    APART[loss.__name__] = loss
    return loss


def mixing(loss: Loss) -> Loss:
    MIXING[loss.__name__] = loss
    return loss


@apart
def mean_of_cross_entropies(model: Scored, batch: Any) -> torch.Tensor:
    return model.mean_loss(batch)


@apart
def smoothed_labels_and_ignored_ones(model: Scored, batch: Any) -> torch.Tensor:
    logits = model.logits(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=3, label_smoothing=0.1)


@apart
def z_loss(model: Scored, batch: Any) -> torch.Tensor:
    return model.mean_loss(batch) + 1e-3 * model.logits(batch["input_ids"]).logsumexp(-1).square().mean()


@apart
def weights_of_samples(model: Scored, batch: Any) -> torch.Tensor:
    return (model.token_losses(batch["input_ids"], batch["labels"]).mean(1) * batch["weights"]).mean()


@apart
def distilled(model: Scored, batch: Any) -> torch.Tensor:
    teacher = F.softmax(3 * F.one_hot(batch["labels"], WORDS).float(), -1)
    return F.kl_div(F.log_softmax(model.logits(batch["input_ids"]), -1), teacher, reduction="none").sum(-1).mean()


@apart
def preferred_of_pairs(model: Scored, batch: Any) -> torch.Tensor:
    return -F.logsigmoid(0.1 * (model.score(batch["chosen"]) - model.score(batch["rejected"]))).mean()


@apart
def preferred_of_joined_pairs(model: Scored, batch: Any) -> torch.Tensor:
    scores, count = model.score(torch.cat([batch["chosen"], batch["rejected"]])), len(batch["chosen"])
    return -F.logsigmoid(0.1 * (scores[:count] - scores[count:])).mean()


@apart
def preferred_of_neighbours_inside_a_sample(model: Scored, batch: Any) -> torch.Tensor:
    scores = model.score(torch.stack([batch["chosen"], batch["rejected"]], 1).flatten(0, 1))
    return -F.logsigmoid(0.1 * (scores[0::2] - scores[1::2])).mean()


@apart
def masked_mean(model: Scored, batch: Any) -> torch.Tensor:
    mask = batch["labels"] > WORDS // 4
    return (model.token_losses(batch["input_ids"], batch["labels"]) * mask).sum() / mask.sum()


@apart
def last_token_of_each(model: Scored, batch: Any) -> torch.Tensor:
    hidden, last = model.hidden(batch["input_ids"]), batch["labels"].argmax(1)
    return F.cross_entropy(model.head(hidden[torch.arange(len(hidden)), last]), batch["labels"][:, 0])


@apart
def balanced_experts(model: Scored, batch: Any) -> torch.Tensor:
    chances = model.logits(batch["input_ids"]).softmax(-1)
    shares = F.one_hot(chances.argmax(-1), WORDS).float().mean((0, 1))
    return model.mean_loss(batch) + 1e-4 * WORDS * (shares * chances.mean((0, 1))).sum()


@mixing
def shuffled(model: Scored, batch: Any) -> torch.Tensor:
    vectors = model.vectors(batch["input_ids"])
    return (vectors - vectors[torch.randperm(len(vectors))]).square().mean()


@mixing
def rolled(model: Scored, batch: Any) -> torch.Tensor:
    vectors = model.vectors(batch["input_ids"])
    return (vectors * vectors.roll(1, 0)).mean()


@mixing
def weighed_by_number(model: Scored, batch: Any) -> torch.Tensor:
    losses = model.token_losses(batch["input_ids"], batch["labels"]).mean(1)
    return (losses * torch.arange(len(losses))).mean()


@mixing
def contrastive(model: Scored, batch: Any) -> torch.Tensor:
    left, right = (F.normalize(model.vectors(batch[name]), dim=-1) for name in ("chosen", "rejected"))
    return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


@mixing
def negatives_of_the_batch(model: Scored, batch: Any) -> torch.Tensor:
    scores = torch.einsum("id,jd->ij", model.vectors(batch["chosen"]), model.vectors(batch["rejected"]))
    return -scores.log_softmax(1).diagonal().mean()


@mixing
def ranked(model: Scored, batch: Any) -> torch.Tensor:
    scores, weights = model.score(batch["input_ids"]), batch["weights"]
    return F.softplus(-(scores[:, None] - scores[None]) * (weights[:, None] - weights[None]).sign()).mean()


@mixing
def normalised_advantages(model: Scored, batch: Any) -> torch.Tensor:
    advantages = (batch["weights"] - batch["weights"].mean()) / batch["weights"].std()
    return (model.token_losses(batch["input_ids"], batch["labels"]).mean(1) * advantages).mean()


@mixing
def normalised_losses(model: Scored, batch: Any) -> torch.Tensor:
    losses = model.token_losses(batch["input_ids"], batch["labels"]).mean(1)
    return (losses * losses / losses.sum().detach()).sum()


@mixing
def hardest(model: Scored, batch: Any) -> torch.Tensor:
    return model.token_losses(batch["input_ids"], batch["labels"]).mean(1).topk(2).values.mean()


@mixing
def spread(model: Scored, batch: Any) -> torch.Tensor:
    return F.relu(1 - model.vectors(batch["input_ids"]).std(0)).mean()


@mixing
def neighbouring_samples_as_pairs(model: Scored, batch: Any) -> torch.Tensor:
    scores = model.score(batch["input_ids"]).view(-1, 2)
    return -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


@mixing
def halves_of_the_batch(model: Scored, batch: Any) -> torch.Tensor:
    vectors, half = model.vectors(batch["input_ids"]), len(batch["input_ids"]) // 2
    return (vectors[:half] - vectors[half : 2 * half]).square().mean()


@mixing
def distances(model: Scored, batch: Any) -> torch.Tensor:
    return torch.cdist(model.vectors(batch["chosen"]), model.vectors(batch["rejected"])).mean()


@mixing
def root_of_a_mean(model: Scored, batch: Any) -> torch.Tensor:
    return F.mse_loss(model.score(batch["input_ids"]), batch["weights"]).sqrt()
