"""Operations of a decode step's rows that an array namespace may fuse: the check, the advance, and the digests of receipts.

None of them is required of a port. The runtime has each as a chain of the operations of :class:`.array_namespace.ArrayNamespace`;
where ``backend.xp`` has all three, it is asked instead, and its results must be the same bits: they are integers (clauses C4, C5).
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, TypeGuard

from .array_namespace import ArrayNamespace
from .dtypes import Array


class StepOperations(Protocol):
    """Three more operations of an array namespace, over the rows of a bucket; each returns new arrays and reads nothing on the host."""

    def accepted_rows(
        self,
        position: Array,
        visible: Array,
        epoch: Array,
        limit: Array,
        stamp: Array,
        table: Array,
        *,
        block_size: int,
        first_block: int,
        num_blocks: int,
    ) -> Array:
        """Which rows may act (clause C5a), bool ``[B]``.

        A row may where its position is not negative and below its limit, visible is one more than it (in int32 that wraps), the
        stamp is the epoch, and the position's page is a block of the pool: a column of the table with an id from ``first_block`` to
        ``num_blocks - 1``.

        Args:
            position, visible, epoch, limit, stamp: int32 ``[B]``; ``stamp`` is a column of a table.
            table: int32 ``[B, width]``, block columns alone.
            block_size: tokens a block.
        """

    def advance_rows(
        self,
        token: Array,
        position: Array,
        visible: Array,
        limit: Array,
        stop: Array,
        accepted: Array,
        next_token: Array,
    ) -> tuple[Array, Array, Array]:
        """Token, position and visible of each row behind the step, int32 ``[B]`` each (clause C4).

        An accepted row has ``next_token`` and one more of the others; where that position reaches the limit, or the token is among
        the row's stop tokens, it retires: position -1, visible 0. Other rows stay.

        Args:
            token, position, visible, limit, next_token: int32 ``[B]``.
            stop: int32 ``[B, S]``.
            accepted: bool ``[B]``.
        """

    def digest_rows(self, values: Array, weights: Array) -> Array:
        """``sum(values[b] * weights[0])`` of each row in int32 that wraps, int32 ``[B]`` (clause C5).

        Args:
            values: int32 ``[B, N]``, part of a wider table maybe.
            weights: int32 ``[1, N]``.
        """


def fuses_step(xp: ArrayNamespace) -> TypeGuard[StepOperations]:
    """Whether a namespace has all three. Its type decides, which is looked at once: a step asks several times."""
    return _has_all(type(xp))


@cache
def _has_all(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("accepted_rows", "advance_rows", "digest_rows"))
