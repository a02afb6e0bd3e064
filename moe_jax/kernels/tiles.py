"""How a leg of the Hopper kernels is cut up: what can be known without importing them."""

import dataclasses

import jax

ROW_ALIGNMENT = 8  # rows that a swizzled tile of shared memory is made of
TILE_K = 64  # 128 bytes of 16-bit numbers, the widest swizzle
CONSUMERS = 2  # warpgroups that multiply


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a leg is cut up. rows, columns: one consumer's tile; the second consumer's lies below it, or beside it with
    `side_by_side`. stages: tiles of K in flight. cluster: blocks side by side (1 or 2) that load their rows together.
    width: tiles of columns before the next tile of rows, so that what the blocks read at a time stays in the L2 cache.
    """

    rows: int = 64
    columns: int = 256
    stages: int = 4
    cluster: int = 1
    width: int = 8
    side_by_side: bool = False

    def __post_init__(self) -> None:
        if not (self.rows > 0 and self.rows % 64 == 0 and self.columns > 0 and self.columns % 128 == 0
                and self.stages >= 2 and self.cluster in (1, 2) and self.width >= 1):  # fmt: skip
            raise ValueError(
                f"{self}: rows must be a multiple of 64, columns of 128, stages 2 or more, cluster 1 or 2, width 1 or more"
            )

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return (self.rows, CONSUMERS * self.columns) if self.side_by_side else (CONSUMERS * self.rows, self.columns)

    def part(self, consumer: jax.Array) -> tuple[jax.Array | int, jax.Array | int]:
        """(row, column) of a consumer's tile in the block."""
        return (0, consumer * self.columns) if self.side_by_side else (consumer * self.rows, 0)
