"""A device's part of the batch, one microbatch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["MicroBatches", "Share", "cut", "share_of"]


class Share(StrEnum):
    """What of an argument a microbatch gets: rows of its own, a random key of its own, or all of it."""

    ROWS = "rows"
    KEY = "key"
    WHOLE = "whole"


def share_of(spec: Any, batch_size: int) -> Share:
    """By its first dimension; raw keys (uint32 pairs) cannot be told from numbers and are handed out as they are."""
    import jax

    if jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return Share.WHOLE if spec.shape else Share.KEY
    is_raw_key = str(spec.dtype) == "uint32" and spec.shape in ((2,), (4,))
    return Share.ROWS if spec.shape[:1] == (batch_size,) and not is_raw_key else Share.WHOLE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatches:
    """The arguments of one copy, rows cut as (count, size, ...).

    `dtypes` are those that the loss reads (None: as it comes); a key is folded with the number of the microbatch among
    all copies, unless there is only one.
    """

    arguments: tuple[Any, ...]
    shares: tuple[Share, ...]
    count: int
    copies: int
    dtypes: tuple[Any, ...]

    def at(self, number: Any) -> list[Any]:
        """The arguments of one microbatch."""
        import jax

        found = []
        for value, share, dtype in zip(self.arguments, self.shares, self.dtypes, strict=True):
            own = value
            if share is Share.ROWS:
                own = value[0] if self.count == 1 else jax.lax.dynamic_index_in_dim(value, number, keepdims=False)
            elif share is Share.KEY and self.count * self.copies > 1:
                own = jax.random.fold_in(value, jax.lax.axis_index("dp") * self.count + number)
            found.append(own if dtype is None else own.astype(dtype))
        return found


def cut(
    arguments: Sequence[Any], shares: Sequence[Share], size: int, copies: int, dtypes: Sequence[Any]
) -> MicroBatches:
    """One copy's part of a batch, in microbatches of `size` rows."""
    rows = next(value.shape[0] for value, share in zip(arguments, shares, strict=True) if share is Share.ROWS)
    count = rows // size
    return MicroBatches(
        arguments=tuple(
            value.reshape(count, size, *value.shape[1:]) if share is Share.ROWS else value
            for value, share in zip(arguments, shares, strict=True)
        ),
        shares=tuple(shares),
        count=count,
        copies=copies,
        dtypes=tuple(dtypes),
    )
