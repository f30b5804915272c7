"""What every kind of table is here: columns, parts, and blocks of rows that are read one after another.

A *part* is one file of a table: a single file has one, a folder has one for each of its files. A *block* is a few
thousand consecutive rows of one part. Only one block is in memory at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchline.errors import BatchlineError, UsageError

Row = dict[str, Any]

BLOCK_ROWS = 4096


class TableDamaged(BatchlineError):
    """A table cannot be read any further. Its text completes a sentence: "Cannot read the input 'x': ..."."""


class Block(ABC):
    """Consecutive rows of one part. ends_group: whether a row group of the input ends with it."""

    part: int
    ends_group: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """How many rows it has."""

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> list[Row]:
        """The values of these columns as Python objects, by row. A value that a row does not have is None."""

    @abstractmethod
    def cells(self, columns: Sequence[str]) -> list[list[Any]]:
        """The values of all columns in order, by row. columns: the names of all, two of which may be equal."""

    @abstractmethod
    def take(self, indices: Sequence[int]) -> Block:
        """Some of its rows. indices: ascending."""

    @abstractmethod
    def arrow(self, schema: Any) -> Any:
        """The block as a `pyarrow.Table` with this schema."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a table. name: its path in the table's folder, with slashes; empty for a single file.

    split: the name of its split, such as `train`, if the table has splits.
    """

    name: str = ""
    split: str | None = None


class Table(ABC):
    """An open table. columns: their names in order, which may contain a name twice. parts: its files.

    delimiter, has_bom: of a table of text, for one that is written in the same way. are_columns_known: False for one
    without rows whose columns are those of its rows.
    """

    columns: tuple[str, ...]
    parts: tuple[Part, ...] = (Part(),)
    delimiter: str = ","
    has_bom: bool = False
    are_columns_known: bool = True

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """All rows in order. Raises: TableDamaged, OSError."""

    @abstractmethod
    def arrow_schema(self) -> Any:
        """The `pyarrow.Schema` of its blocks. Raises: TableDamaged, UsageError for values that have no common type."""

    @abstractmethod
    def digest(self) -> str:
        """Changes when the content does."""

    def binary_column(self) -> str | None:
        """The name of a column with bytes, if there is one."""
        return None


def refuse_ambiguous_columns(columns: Sequence[str], used: Sequence[str]) -> None:
    """Raises: UsageError if a used column's name is that of two columns."""
    for name in used:
        if columns.count(name) > 1:
            raise UsageError(f"The table has {columns.count(name)} columns {name!r}; rename all but one of them.")
