"""Tables of text: CSV, TSV, and JSON lines with one object per row.

Cells of CSV stay the text that they are: no number or date is guessed, so that a row is written as it was read. A line
of JSON is kept in the same way.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from batchline.batch.check import file_digest
from batchline.batch.file_format import foreign_encoding
from batchline.batch.lines import syntax_problem
from batchline.errors import UsageError, counted
from batchline.openai_api.parsing import WRITABLE_DEPTH, can_write_again
from batchline.tables.rows import BLOCK_ROWS, Block, Row, Table, TableDamaged

_BLOCK_CHARS = 8 << 20
_BOM = b"\xef\xbb\xbf"
_SAMPLE_BYTES = 1 << 16
_DELIMITERS = ",;\t|"
_MAX_CELL_CHARS = 1 << 28
_MAX_DIGITS = 20
_LONG_INTEGER = re.compile(rb"\d{19}")
_BATCH_LINE = frozenset({"custom_id", "method", "url", "body"})


class CsvBlock(Block):
    """Rows of text cells."""

    def __init__(self, names: Sequence[str], records: list[list[str]]) -> None:
        self.part = 0
        self._names = names
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def rows(self, columns: Sequence[str]) -> list[Row]:
        """Text for every cell; an empty cell is an empty text."""
        indices = [(name, self._names.index(name)) for name in columns]
        return [{name: record[index] for name, index in indices} for record in self._records]

    def cells(self, columns: Sequence[str]) -> list[list[Any]]:
        """The text of every cell."""
        return [list(record) for record in self._records]

    def take(self, indices: Sequence[int]) -> CsvBlock:
        """Some of its rows."""
        return CsvBlock(self._names, [self._records[index] for index in indices])

    def arrow(self, schema: Any) -> Any:
        """A table of strings."""
        import pyarrow as pa  # an extra, only for formats that need it

        columns = zip(*self._records, strict=True) if self._records else ([] for _ in self._names)
        return pa.Table.from_arrays([pa.array(list(column), pa.string()) for column in columns], schema=schema)


class CsvTable(Table):
    """A CSV file with a header. path: its plain bytes."""

    def __init__(self, path: Path, delimiter: str | None) -> None:
        """delimiter: None is the one that the header shows. Raises: TableDamaged, OSError."""
        self._path = path
        with path.open("rb") as file:
            sample = file.read(_SAMPLE_BYTES)
        _refuse_other_encoding(sample)
        self.has_bom = sample.startswith(_BOM)
        self._delimiter = delimiter or _likely_delimiter(sample)
        if delimiter is None:  # tabs of a TSV file are not for CSV
            self.delimiter = self._delimiter
        header = next(self._records(), None)
        if header is None:
            raise TableDamaged("it is empty; the first line of a CSV file has the names of its columns.")
        self.columns = tuple(header[1])

    def blocks(self) -> Iterator[CsvBlock]:
        """The records after the header. Raises also: TableDamaged for one with more or fewer cells."""
        records = islice(self._records(), 1, None)
        width = len(self.columns)
        cells: list[list[str]] = []
        num_chars = 0
        for line_number, record in records:
            if len(record) != width:
                raise TableDamaged(
                    f"the row on line {line_number:,} has {counted(len(record), 'cell')}, and the header has {width:,}."
                )
            cells.append(record)
            num_chars += sum(map(len, record))
            if len(cells) == BLOCK_ROWS or num_chars > _BLOCK_CHARS:
                yield CsvBlock(self.columns, cells)
                cells, num_chars = [], 0
        if cells:
            yield CsvBlock(self.columns, cells)

    def arrow_schema(self) -> Any:
        """Every column is text."""
        import pyarrow as pa  # an extra, only for formats that need it

        return pa.schema([pa.field(name, pa.string()) for name in self.columns])

    def digest(self) -> str:
        """Of all bytes."""
        return file_digest(self._path)[0]

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """(line number of its first line, cells) of each record, the header first. Blank lines are skipped."""
        with self._path.open("rb") as file:
            text = io.TextIOWrapper(file, "utf-8-sig", newline="")
            reader = csv.reader(text, delimiter=self._delimiter, strict=True)
            line_number = 1
            try:
                while (record := _next_record(reader)) is not None:
                    if "\x00" in "".join(record):
                        raise TableDamaged(f"the row on line {line_number:,} has a NUL character; remove it.")
                    if record:
                        yield line_number, record
                    line_number = reader.line_num + 1
            except csv.Error as exc:
                raise TableDamaged(f"the row on line {line_number:,} is not valid CSV: {exc}.") from exc
            except UnicodeDecodeError as exc:
                raise TableDamaged(
                    f"line {_first_bad_line(self._path):,} is not UTF-8 text. If the file is Latin-1 or Windows-1252, "
                    "convert it: iconv -f WINDOWS-1252 -t UTF-8 FILE > utf8.csv"
                ) from exc


def _next_record(reader: Iterator[list[str]]) -> list[str] | None:
    """The next record; None at the end. The limit of the csv module, which all code of the process shares, is raised
    only meanwhile."""
    before = csv.field_size_limit(_MAX_CELL_CHARS)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)


class JsonBlock(Block):
    """Rows as parsed objects, and the lines that they come from."""

    def __init__(self, lines: list[bytes], values: list[Row]) -> None:
        self.part = 0
        self.lines = lines
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, columns: Sequence[str]) -> list[Row]:
        """The objects' values."""
        return [{name: value.get(name) for name in columns} for value in self.values]

    def cells(self, columns: Sequence[str]) -> list[list[Any]]:
        """The same as lists."""
        return [[value.get(name) for name in columns] for value in self.values]

    def take(self, indices: Sequence[int]) -> JsonBlock:
        """Some of its rows."""
        return JsonBlock([self.lines[index] for index in indices], [self.values[index] for index in indices])

    def arrow(self, schema: Any) -> Any:
        """The values in the schema's types."""
        import pyarrow as pa  # an extra, only for formats that need it

        arrays = [pa.array([value.get(field.name) for value in self.values], field.type) for field in schema]
        return pa.Table.from_arrays(arrays, schema=schema)


class JsonLinesTable(Table):
    """A file with one JSON object per line. Its columns are the keys of all rows, in the order of their appearance."""

    def __init__(self, path: Path) -> None:
        """Reads the whole file once. Raises: TableDamaged, OSError, UsageError for a batch file."""
        self._path = path
        self._schema: Any = None
        with path.open("rb") as file:
            _refuse_other_encoding(file.read(_SAMPLE_BYTES))
        names: dict[str, None] = {}
        for block in self.blocks():
            if not names and block.values and block.values[0].keys() >= _BATCH_LINE:
                raise UsageError(
                    "It is a batch file: each line already is a request. Leave out the options for tables."
                )
            for value in block.values:
                if not value.keys() <= names.keys():
                    names.update(dict.fromkeys(value))
        self.columns = tuple(names)
        self.are_columns_known = bool(names)

    def blocks(self) -> Iterator[JsonBlock]:
        """The lines that are not blank."""
        lines: list[bytes] = []
        values: list[Row] = []
        num_bytes = 0
        with self._path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                text = line.removeprefix(_BOM).strip() if line_number == 1 else line.strip()
                if not text:
                    continue
                values.append(_object(text, line_number))
                lines.append(text)
                num_bytes += len(text)
                if len(lines) == BLOCK_ROWS or num_bytes > _BLOCK_CHARS:
                    yield JsonBlock(lines, values)
                    lines, values, num_bytes = [], [], 0
        if lines:
            yield JsonBlock(lines, values)

    def arrow_schema(self) -> Any:
        """The types that fit the values of all rows. Reads the whole file, and only once."""
        if self._schema is None:
            self._schema = self._common_schema()
        return self._schema

    def _common_schema(self) -> Any:
        import pyarrow as pa  # an extra, only for formats that need it

        found = pa.schema([])
        for block in self.blocks():
            for name in dict.fromkeys(key for value in block.values for key in value):
                found = _with_type_of(found, name, [value.get(name) for value in block.values])
        schema = pa.schema([found.field(name) for name in self.columns])
        for block in self.blocks():  # float64 is the common type of integers and floats, but not every integer fits it
            for field in schema:
                with _one_type(field.name):
                    pa.array([value.get(field.name) for value in block.values], field.type)
        return schema

    def digest(self) -> str:
        """Of all bytes."""
        return file_digest(self._path)[0]


def _with_type_of(schema: Any, name: str, values: list[Any]) -> Any:
    """The schema with a column that takes the values as well. Raises: UsageError."""
    import pyarrow as pa  # an extra, only for formats that need it

    with _one_type(name):
        added = pa.schema([pa.field(name, pa.array(values).type)])
        return pa.unify_schemas([schema, added], promote_options="permissive")


@contextmanager
def _one_type(name: str) -> Iterator[None]:
    """Raises: UsageError for values of the column that pyarrow gives no type in the block."""
    import pyarrow as pa  # an extra, only for formats that need it

    try:
        yield
    except (pa.ArrowException, OverflowError, TypeError) as exc:
        raise UsageError(
            f"The values of {name!r} have no common type, which this output needs ({exc}). Write JSON lines instead: "
            "-o NAME.jsonl."
        ) from exc


def _object(text: bytes, line_number: int) -> Row:
    try:
        value = orjson.loads(text)
        if not can_write_again(text, value):
            raise TableDamaged(f"line {line_number:,} is nested too deeply: more than {WRITABLE_DEPTH} levels.")
        if _LONG_INTEGER.search(text):  # orjson makes floats of integers beyond 64 bits
            value = json.loads(text, parse_int=_integer_or_text)
    except orjson.JSONDecodeError as exc:
        raise TableDamaged(f"line {line_number:,} is not valid JSON: {syntax_problem(text)}.") from exc
    if not isinstance(value, dict):
        raise TableDamaged(f"line {line_number:,} is JSON, but not an object with the values of a row.")
    return value


def _integer_or_text(digits: str) -> int | str:
    """An integer; one beyond 64 bits stays text, so that no digit is lost."""
    value = int(digits) if len(digits) <= _MAX_DIGITS else None
    return value if value is not None and -(2**63) <= value < 2**64 else digits


def _first_bad_line(path: Path) -> int:
    """The number of the first line that is not UTF-8."""
    with path.open("rb") as file:
        return next((number for number, line in enumerate(file, 1) if not _is_utf8(line)), 0)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse_other_encoding(sample: bytes) -> None:
    encoding = foreign_encoding(sample)
    if encoding is not None:
        raise TableDamaged(
            f"it is {encoding} text, and a table of text is UTF-8. Convert it: iconv -f {encoding} -t UTF-8 FILE > "
            "utf8.csv"
        )
    if b"\x00" in sample:
        raise TableDamaged("it is binary data, not a table of text.")


def _likely_delimiter(sample: bytes) -> str:
    """The most frequent of the usual delimiters in the header, outside of quotes."""
    header = sample.removeprefix(_BOM).split(b"\n", 1)[0].decode("utf-8", "replace")
    plain = "".join(header.split('"')[::2])
    best = max(_DELIMITERS, key=plain.count)
    return best if plain.count(best) else ","
