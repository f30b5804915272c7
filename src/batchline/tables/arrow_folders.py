"""Tables that are folders: datasets as the Hugging Face library saves them, and folders of Parquet files.

This module imports pyarrow, so it is imported only for such tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchline.tables.arrow_rows import ArrowFile, ArrowTable, parquet_file
from batchline.tables.formats import SPLITS_FILE, STATE_FILE
from batchline.tables.rows import BLOCK_ROWS, Part, TableDamaged


def dataset_table(folder: Path) -> ArrowTable:
    """A folder as `Dataset.save_to_disk` or `DatasetDict.save_to_disk` writes it. Raises: TableDamaged, OSError."""
    found: list[tuple[Part, Path]] = []
    extra: list[Path] = []
    if (folder / SPLITS_FILE).is_file():
        extra.append(folder / SPLITS_FILE)
        for split in _json_file(folder / SPLITS_FILE, "splits", list):
            _refuse_outside(str(split), SPLITS_FILE)
            found += _arrow_files(folder / str(split), f"{split}/", str(split), extra)
    else:
        found += _arrow_files(folder, "", None, extra)
    if not found:
        raise TableDamaged("no file of it has rows; it is an empty dataset.")
    return ArrowTable(found, _arrow_file, extra)


def _arrow_files(folder: Path, prefix: str, split: str | None, extra: list[Path]) -> list[tuple[Part, Path]]:
    extra.append(folder / STATE_FILE)
    names = [str(entry["filename"]) for entry in _json_file(folder / STATE_FILE, "_data_files", list)]
    for name in names:
        _refuse_outside(name, STATE_FILE)
    return [(Part(prefix + name, split), folder / name) for name in names]


def _refuse_outside(name: str, listed_in: str) -> None:
    """Raises: TableDamaged for the name of a file that is not in the folder; an output may be written by this name."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise TableDamaged(f"{listed_in} in it names {name!r}, which is not in the folder.")


def _json_file(path: Path, key: str, kind: type) -> Any:
    try:
        value = json.loads(path.read_bytes())[key]
    except (ValueError, KeyError, TypeError) as exc:
        raise TableDamaged(f"{path.name} in it is damaged.") from exc
    if not isinstance(value, kind):
        raise TableDamaged(f"{path.name} in it is damaged.")
    return value


def _arrow_file(path: Path) -> ArrowFile:
    def read() -> Iterator[tuple[pa.Table, bool]]:
        with pa.OSFile(str(path)) as source, _reader(source) as reader:
            for batch in _batches(reader):
                table = pa.Table.from_batches([batch])
                yield from ((table.slice(start, BLOCK_ROWS), False) for start in range(0, len(table), BLOCK_ROWS))

    with pa.OSFile(str(path)) as source, _reader(source) as reader:
        return ArrowFile(path, reader.schema, read)


def _reader(source: Any) -> Any:
    """A reader of Arrow's stream format, which the Hugging Face library writes, or of its file format."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def parquet_folder_table(folder: Path) -> ArrowTable:
    """A folder of Parquet files, in the order of their names. Raises: TableDamaged, OSError."""
    paths = parquet_files(folder)
    if not paths:
        raise TableDamaged(
            "it is a folder without Parquet files, and not one that `Dataset.save_to_disk` has written either."
        )
    splits = [_split_of(path, folder) for path in paths]
    if None in splits:
        splits = [None] * len(paths)
    named = [
        (Part(path.relative_to(folder).as_posix(), split), path) for path, split in zip(paths, splits, strict=True)
    ]
    return ArrowTable(named, parquet_file, ())


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files in a folder and its subfolders, without hidden ones."""
    found = folder.rglob("*.parquet")
    return sorted(path for path in found if not any(p[0] in "._" for p in path.relative_to(folder).parts))


def _split_of(path: Path, folder: Path) -> str | None:
    """`train` of `train-00000-of-00002.parquet` or `train/0000.parquet`, the names that the Hugging Face hub uses."""
    relative = path.relative_to(folder)
    name = relative.name.split(".")[0].split("-")[0]
    for candidate in (name, *relative.parts[:-1]):
        if candidate in ("train", "test", "validation", "val", "valid", "dev"):
            return candidate
    return None
