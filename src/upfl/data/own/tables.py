"""Tables: CSV, Parquet, and Arrow streams as Hugging Face keeps them. Read with pyarrow (the extra `tables`).

A column names the class (`--label`), one the client (`--client`), perhaps one the newcomers (`--newcomer`). Samples are
one of: columns of numbers (all others, or `--features a,b,c`; one column of lists of numbers is an embedding), images
(`--image`: files beside the table, or their bytes), lists of tokens (`--tokens`), texts (`--text`).

A table is read twice, a part at a time: labels and clients first, then samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.data.draft import MISSING, Column, Draft, classes_of, clients_of, newcomers_of
from upfl.data.forms import Form, Tokens, Vectors
from upfl.data.images import Encoded, NotAnImageError, looked_at
from upfl.data.own import cells
from upfl.data.own.arrays import pixel_form
from upfl.data.own.folders import common_shape, decoded, refuse
from upfl.data.own.options import LENGTH, VOCABULARY, Options
from upfl.errors import DataError
from upfl.safe.limits import exceeded, limit
from upfl.suggest import unknown

SUFFIXES = (".csv", ".tsv", ".parquet")
ROWS = 2**16  # rows that are read together
BLOCK = 2**23  # bytes of a CSV file that are read together

Parts = Callable[[Sequence[str]], Iterator[Any]]  # record batches with the columns that are asked for, in this order
Read = Callable[[Any, int], NDArray[Any]]  # samples of a record batch whose first row has that number


@dataclass(frozen=True)
class Table:
    """A table that is not read yet."""

    where: str
    folder: Path  # in which image files are looked for
    types: dict[str, Any]  # Arrow's, by column
    parts: Parts
    text: bool = False  # whether all is written as text, as in CSV: then what a column holds is known by reading it
    class_names: dict[str, tuple[str, ...]] | None = None  # of columns of numbers, where the file has names for these

    def require(self, name: str) -> str:
        if name not in self.types:
            raise DataError(f"{self.where}: {unknown('column', name, self.types)}")
        return name

    def column(self, name: str) -> Column:
        """A column of names or numbers, read whole: its values, and which of them each row has."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.require(name)
        with reading(self.where):
            chunks = [part.column(0) for part in self.parts([name])]
            whole = pa.chunked_array(chunks, chunks[0].type if chunks else pa.string())
            if pa.types.is_dictionary(whole.type):
                whole = whole.cast(whole.type.value_type)
            simple = pa.types.is_integer(whole.type) or pa.types.is_boolean(whole.type)
            text = pa.types.is_string(whole.type) or pa.types.is_large_string(whole.type)
            if pa.types.is_floating(whole.type):
                return Column.of(whole.to_numpy(), f"{self.where}: column '{name}'")
            if pa.types.is_null(whole.type):
                raise DataError(f"{self.where}: column '{name}' is empty")
            if not simple and not text:
                raise DataError(
                    f"{self.where}: column '{name}' is of type {whole.type}; texts or whole numbers are needed"
                )
            encoded = pc.dictionary_encode(whole)
            codes = [pc.fill_null(chunk.indices, MISSING).to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
            values = encoded.chunk(0).dictionary if encoded.num_chunks else pa.array([], pa.string())
            different = values.to_numpy(zero_copy_only=False)
            if text:
                different = different.astype(np.str_)
        together = np.concatenate([*codes, np.empty(0, np.int32)]).astype(np.int64)
        return Column(different, together, f"{self.where}: column '{name}'").without_missing()


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Whatever goes wrong inside Arrow is told by the file's name."""
    import pyarrow as pa

    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,
        MemoryError,
    ) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{where}: cannot be read: {first[:300]}") from error


def open_table(path: Path) -> Table:
    """A CSV or Parquet file."""
    require_arrow()
    if not path.is_file():
        raise DataError(f"{path}: not a file")
    if (size := path.stat().st_size) > limit("FILE"):
        raise DataError(f"{path}: {exceeded('FILE', size)}")
    return _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)


def require_arrow() -> None:
    try:
        import pyarrow  # noqa: F401 - an extra
    except ImportError as error:
        raise DataError("tables need `pip install 'upfl[tables]'` (pyarrow is missing)") from error


def _parquet(path: Path) -> Table:
    import pyarrow.parquet as pq

    with reading(str(path)):
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow

        def parts(names: Sequence[str]) -> Iterator[Any]:
            with pq.ParquetFile(path, memory_map=True) as file:
                for part in file.iter_batches(ROWS, columns=list(names), use_threads=False):
                    yield part.select(list(names))

    return Table(str(path), path.parent, _types(schema, str(path)), parts)


def _csv(path: Path) -> Table:
    import pyarrow as pa
    from pyarrow import csv

    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    read = csv.ReadOptions(use_threads=False, block_size=BLOCK)

    def opened(names: Sequence[str] | None, types: dict[str, Any]) -> Any:
        convert = csv.ConvertOptions(column_types=types, include_columns=names, strings_can_be_null=True)
        return csv.open_csv(path, read, parse, convert)

    with reading(str(path)), opened(None, {}) as first:
        schema = first.schema
    types = _types(schema, str(path))

    def parts(names: Sequence[str]) -> Iterator[Any]:
        # Numbers as wide as can be: what stands in the first lines does not say what comes.
        with opened(list(names), {name: pa.string() for name in names}) as stream:
            yield from stream

    return Table(str(path), path.parent, types, parts, text=True)


def _types(schema: Any, where: str) -> dict[str, Any]:
    with reading(where):  # names may not be text
        names = list(schema.names)
    if twice := {name for name in names if names.count(name) > 1}:
        raise DataError(f"{where}: two columns are named '{min(twice)}'")
    return {name: schema.field(name).type for name in names}


def read(path: Path, options: Options) -> Draft:
    return read_table(open_table(path), options)


def read_table(table: Table, options: Options) -> Draft:
    options.only("tables", *(name for name in vars(options) if name != "scale"))
    if options.label is None:
        raise DataError(f"{table.where}: say which column has the classes, by --label; it has {', '.join(table.types)}")
    label = table.column(options.label)
    given = (table.class_names or {}).get(options.label)
    labels, names = _named(label, given) if given else classes_of(label)
    groups = clients = newcomers = None
    if options.client is not None:
        groups, clients = clients_of(table.column(options.client))
    if options.newcomer is not None:
        if groups is None or clients is None:
            raise DataError("--newcomer names a column that says which clients are newcomers: give --client, too")
        newcomers = newcomers_of(table.column(options.newcomer), groups, clients)
    if groups is None and (labels == MISSING).any():
        raise DataError(
            f"{label.where}: {label.first(labels == MISSING)} has no label, and nothing says whose it is (--client)"
        )
    taken = {options.label, options.client, options.newcomer}
    form, names_read, convert, left_out = samples_of(table, options, taken)

    def parts() -> Iterator[NDArray[Any]]:
        return converted(table, names_read, convert)

    roles = {"classes": options.label, "clients": options.client, "newcomers": options.newcomer}
    told = [f"{what}: column '{name}'" for what, name in roles.items() if name is not None]
    noun = "features" if isinstance(form, Vectors) else form.noun
    told.append(f"{noun}: {_in_words(names_read, bool(options.features))}")
    return Draft(form, labels, names, parts, groups, clients, newcomers, left_out, tuple(told))


def _in_words(names: Sequence[str], named: bool) -> str:
    if len(names) == 1:
        return f"column '{names[0]}'"
    return f"the {len(names)} columns that are named" if named else f"all {len(names)} other columns of numbers"


def converted(table: Table, names: Sequence[str], convert: Read) -> Iterator[NDArray[Any]]:
    """The samples of all rows, a part at a time."""
    start = 0
    with reading(table.where):
        for part in table.parts(names):
            yield convert(part, start)
            start += part.num_rows


def _named(column: Column, names: tuple[str, ...]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels that are numbers of named classes, as Hugging Face has them; -1 is a label that is not told."""
    values = np.append(column.values.astype(np.int64), MISSING)[column.codes]
    if len(values) and not (values.min() >= MISSING and values.max() < len(names)):
        raise DataError(
            f"{column.where}: labels from {values.min()} to {values.max()}, and {len(names)} classes have names"
        )
    if not (values != MISSING).any():
        raise DataError(f"{column.where}: there is no label in it")
    return values, names


def samples_of(table: Table, options: Options, taken: set[str | None]) -> tuple[Form, list[str], Read, tuple[str, ...]]:
    """The form of a table's samples, the columns that hold them, how a part is read, and what is left out."""
    if options.image:
        form, convert = _images(table, table.require(options.image), options)
        return form, [options.image], convert, ()
    if options.tokens:
        form, convert = _tokens(table, table.require(options.tokens), options)
        return form, [options.tokens], convert, ()
    if options.text:
        name = table.require(options.text)
        length, vocabulary = options.length or LENGTH, options.vocabulary or VOCABULARY
        words = Tokens(length=length, vocabulary=vocabulary, words=True, column=name)
        return words, [name], lambda part, start: cells.texts(part, start, words, table.where), ()
    names = [table.require(name) for name in options.features]
    left_out = []
    if not names:
        for name, kind in table.types.items():
            if name in taken:
                continue
            if cells.is_number(kind):
                names.append(name)
            else:
                left_out.append(f"column '{name}' ({kind}): not a number")
        lists = [name for name, kind in table.types.items() if cells.is_list(kind) and name not in taken]
        if not names and len(lists) == 1:  # an embedding
            names, left_out = lists, [line for line in left_out if f"'{lists[0]}'" not in line]
    if not names:
        raise DataError(f"{table.where}: no column of numbers is left for features; name --image, --tokens or --text")
    if set(names) & taken:
        raise DataError(
            f"{table.where}: column '{min(set(names) & taken, key=str)}' is not a feature: it is the answer"
        )
    vectors = vector_form(table, names)
    return vectors, names, lambda part, start: cells.rows(part, start, vectors, table.where), tuple(left_out)


def vector_form(table: Table, names: Sequence[str]) -> Vectors:
    if len(names) == 1 and cells.is_list(table.types[names[0]]):
        with reading(table.where):
            first = next((part for part in table.parts(names) if part.num_rows), None)
            width = len(first.column(0)[0].as_py() or ()) if first is not None else 0
        if not width:
            raise DataError(f"{table.where}: column '{names[0]}', row 1: is empty; a list of numbers is needed")
        return Vectors(features=tuple(f"{names[0]}[{i}]" for i in range(width)))
    for name in names:
        if not cells.is_number(table.types[name]) and not table.text:
            raise DataError(f"{table.where}: column '{name}' is of type {table.types[name]}, and features are numbers")
    return Vectors(features=tuple(names))


def _tokens(table: Table, name: str, options: Options) -> tuple[Tokens, Read]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = table.types[name]
    if not cells.is_list(kind) or not pa.types.is_integer(kind.value_type):
        raise DataError(f"{table.where}: column '{name}' is of type {kind}; lists of whole numbers are needed")
    length = highest = 1
    with reading(table.where):
        for part in table.parts([name]):
            longest, most = pc.max(pc.list_value_length(part.column(0))), pc.max(pc.list_flatten(part.column(0)))
            length, highest = max(length, longest.as_py() or 1), max(highest, most.as_py() or 1)
    try:
        vocabulary = options.vocabulary or highest + 1
        form = Tokens(length=options.length or length, vocabulary=vocabulary, column=name)
    except ValueError as error:
        raise DataError(f"{table.where}: column '{name}': {error}") from error
    return form, lambda part, start: cells.tokens(part, start, form, table.where)


def _images(table: Table, name: str, options: Options) -> tuple[Form, Read]:
    looks, wrong = list[tuple[tuple[int, int], bool]](), list[str]()
    first = list[Path | Encoded]()
    with reading(table.where):
        start = 0
        for part in table.parts([name]):
            for image in cells.images(part, start, table.where, table.folder):
                try:
                    looks.append(looked_at(image))
                    first.append(Encoded(b"", str(image)))  # its name alone
                except NotAnImageError:
                    wrong.append(f"{image}: is no image, or not there")
                except DataError as error:
                    wrong.append(str(error))
            start += part.num_rows
    refuse(wrong, "images cannot be read")
    if not looks:
        raise DataError(f"{table.where}: there are no rows in it")
    shape, resize = common_shape(first, looks, options.resize), options.resize is not None

    def convert(part: Any, start: int) -> NDArray[Any]:
        return np.concatenate(list(decoded(list(cells.images(part, start, table.where, table.folder)), shape, resize)))

    return pixel_form(shape), convert
