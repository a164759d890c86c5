"""Readers of one's own data: nothing is lost, nothing comes twice, and what is refused is named."""

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.helpers.own import write_csv
from upfl.data.draft import Draft
from upfl.data.forms import Pixels, Tokens, Vectors
from upfl.data.own.options import Options
from upfl.data.own.reading import read
from upfl.errors import DataError

NAMED = Options(label="y", client="who")


def clients(draft: Draft) -> list[str]:
    assert draft.clients is not None
    assert draft.groups is not None
    return [bytes(draft.clients[group]).decode() for group in draft.groups]


def labels(draft: Draft) -> list[str | None]:
    return [None if label < 0 else draft.class_names[label] for label in draft.labels]


names = st.text(st.characters(categories=("L", "N"), include_characters=" -_"), min_size=1, max_size=6).map(
    lambda text: f"n{text}".strip()
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[NDArray[np.float32], list[str], list[str]]:
    rows, width = draw(st.integers(4, 40)), draw(st.integers(1, 4))
    value = st.floats(-1e6, 1e6, width=32)
    x = np.array(draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=rows, max_size=rows)))
    pools = [draw(st.lists(names, min_size=2, max_size=3, unique=True)) for _ in range(2)]
    y, who = ([pool[i] if i < 2 else draw(st.sampled_from(pool)) for i in range(rows)] for pool in pools)
    return x.astype(np.float32), y, who


@settings(max_examples=60)
@given(tables(), st.sampled_from(["csv", "parquet", "npz"]))
def test_a_table_comes_back_row_by_row(table: tuple[NDArray[np.float32], list[str], list[str]], kind: str) -> None:
    x, y, who = table
    with tempfile.TemporaryDirectory() as folder:
        path, columns = Path(folder, f"t.{kind}"), [f"f{i}" for i in range(x.shape[1])]
        if kind == "csv":
            rows = [[*map(repr, row), a, b] for row, a, b in zip(x.tolist(), y, who, strict=True)]
            write_csv(path, [*columns, "y", "who"], rows)
        elif kind == "parquet":
            features = {name: x[:, i] for i, name in enumerate(columns)}
            pq.write_table(pa.table(features | {"y": y, "who": who}), path)
        else:
            np.savez(path, x=x, y=np.array(y), client=np.array(who))
        draft = read(path, Options() if kind == "npz" else NAMED)
        assert isinstance(draft.form, Vectors)
        np.testing.assert_array_equal(draft.gathered(), x)
        assert labels(draft) == y
        assert clients(draft) == who
        assert sorted(draft.class_names) == sorted(set(y))


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), min_size=6, max_size=20), st.data())
def test_a_folder_comes_back_image_by_image(held: list[tuple[str, str]], data: st.DataObject) -> None:
    held = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"), *held]
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), {}
        for place, (client, label) in enumerate(held):
            image = np.full((3, 2), place, np.uint8)
            path = folder / client / label / f"{place:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
            expected[place] = (client, label)
        (folder / "a" / "readme.txt").write_text("not an image")
        draft = read(folder, Options())
        assert isinstance(draft.form, Pixels)
        assert draft.form.shape == (1, 3, 2)
        x = draft.gathered()
        found = dict(zip(x[:, 0, 0, 0].tolist(), zip(clients(draft), labels(draft), strict=True), strict=True))
        assert found == expected
        assert draft.left_out == ("a/readme.txt: no image",)


@settings(max_examples=60)
@given(tables(), st.sampled_from(["csv", "parquet"]), st.sampled_from(["feature", "client", "label"]), st.data())
def test_a_cell_that_cannot_be_is_named_by_its_row(
    table: tuple[NDArray[np.float32], list[str], list[str]], kind: str, what: str, data: st.DataObject
) -> None:
    x, y, who = table
    row, columns = data.draw(st.integers(0, len(x) - 1)), [f"f{i}" for i in range(x.shape[1])]
    values: list[list[Any]] = [*x.T.tolist(), list[Any](who)]
    answers: list[Any] = [float(name == y[0]) for name in y] if what == "label" else list(y)
    if what == "label":
        answers[row] = data.draw(st.sampled_from([float("inf"), float("-inf"), 0.25]))
    else:
        values[-1 if what == "client" else data.draw(st.integers(0, x.shape[1] - 1))][row] = None
    named = dict(zip([*columns, "who"], values, strict=True)) | {"y": answers}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"t.{kind}")
        if kind == "csv":
            write_csv(path, list(named), list(zip(*named.values(), strict=True)))
        else:
            pq.write_table(pa.table(named), path)
        with pytest.raises(DataError) as caught:
            list(read(path, NAMED).parts())
    assert str(path) in str(caught.value)
    assert re.search(rf"row {row + 1}\b", str(caught.value)), str(caught.value)


@settings(max_examples=20)
@given(st.integers(2, 3), st.integers(2, 3), st.sampled_from(["cut", "wider", "again"]), st.data())
def test_an_image_that_cannot_be_taken_is_named(clients: int, classes: int, what: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, f"c{i}", f"y{j}", f"{k}.png") for i in range(clients) for j in range(classes) for k in "01"]
        for place, file in enumerate(files):
            picture(file, value=place)
        odd, other = data.draw(st.lists(st.sampled_from(files), min_size=2, max_size=2, unique=True))
        if what == "cut":
            odd.write_bytes(odd.read_bytes()[: data.draw(st.integers(0, 40))])
        elif what == "wider":
            picture(odd, (5, 4), 99)
        else:
            odd.write_bytes(other.read_bytes())
        with pytest.raises(DataError) as caught:
            list(read(Path(name), Options()).parts())
        assert str(odd) in str(caught.value)
        assert what != "again" or str(other) in str(caught.value)


def table(folder: Path, **changes: Any) -> Path:
    """A good table of six rows, with columns changed, left out (None) or added."""
    columns: dict[str, Any] = {
        "f": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "y": ["a", "b", "a", "b", "a", "b"],
        "who": ["p", "p", "q", "q", "r", "r"],
    } | changes
    pq.write_table(
        pa.table({name: value for name, value in columns.items() if value is not None}), folder / "t.parquet"
    )
    return folder / "t.parquet"


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, Options(label="z", client="who"), ["t.parquet", "column", "'z'"]),
        ({}, Options(label="y", client="whom"), ["column", "'whom'", "did you mean who"]),
        ({}, Options(client="who"), ["--label", "f, y, who"]),
        ({"y": [1.0, 2.0, float("inf"), 1.0, 2.0, 1.0]}, NAMED, ["row 3", "not finite"]),
        ({"y": [0.5, 1.5, 0.5, 1.5, 0.5, 1.5]}, NAMED, ["row 1", "a measurement"]),
        ({"y": list("abcdef")}, NAMED, ["all 6 labels are different"]),
        ({"y": ["a"] * 6}, NAMED, ["one class alone"]),
        ({"f": [1.0, 2.0, float("nan"), 4.0, 5.0, 6.0]}, NAMED, ["row 3", "feature 'f'", "not a number"]),
        ({"f": [1.0, None, 3.0, 4.0, 5.0, 6.0]}, NAMED, ["row 2", "feature 'f'"]),
        ({"f": [1e30, 2.0, 3.0, 4.0, 5.0, 6.0]}, NAMED, ["row 1", "beyond 1e+15"]),
        ({"who": ["p", None, "q", "q", "r", "r"]}, NAMED, ["row 2", "no client"]),
        ({"who": ["p"] * 6}, NAMED, ["only one client"]),
        ({"y": ["a", None, "a", "b", "a", "b"]}, Options(label="y"), ["row 2", "no label", "--client"]),
        ({"f": None}, NAMED, ["no column of numbers"]),
        ({}, Options(label="y", client="who", features=("f", "y")), ["column 'y'", "not a feature"]),
        ({"new": ["yes", "no", "no", "no", "no", "no"]}, Options("y", "who", "new"), ["client 'p'", "both"]),
        ({"new": ["perhaps"] * 6}, Options("y", "who", "new"), ["'perhaps'", "true or false"]),
        ({"t": [[1, 2], [3], [], [4], [5], [6]]}, Options("y", "who", tokens="t"), ["row 3", "one at least"]),
        ({"t": ["one", "two", " ", "x", "y", "z"]}, Options("y", "who", text="t"), ["row 3", "no text"]),
    ],
)
def test_what_is_wrong_with_a_table_is_named(
    tmp_path: Path, changes: dict[str, Any], options: Options, words: list[str]
) -> None:
    path = table(tmp_path, **changes)
    with pytest.raises(DataError) as caught:
        list(read(path, options).parts())
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_names_of_columns_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"f\xb8,y,who\n1,a,p\n2,b,q\n")
    with pytest.raises(DataError, match=r"t\.csv: cannot be read"):
        read(tmp_path / "t.csv", NAMED)


def test_samples_are_of_one_kind() -> None:
    with pytest.raises(DataError, match="--image and --text: samples are one of these"):
        Options(label="y", text="y", image="f")


def test_a_cell_that_is_no_number_is_named_by_its_row(tmp_path: Path) -> None:
    rows: list[list[Any]] = [[1, "a", "p"], [2, "b", "p"], ["x7", "a", "q"], [4, "b", "q"]]
    path = write_csv(tmp_path / "t.csv", ["f", "y", "who"], rows)
    with pytest.raises(DataError, match=r"t\.csv: row 3, feature 'f': 'x7' is not a number"):
        list(read(path, Options("y", "who", features=("f",))).parts())


def picture(path: Path, size: tuple[int, int] = (4, 4), value: int = 0, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 9)).save(path)


def folder_of_images(folder: Path) -> Path:
    for place, (client, label) in enumerate((c, y) for c in "pq" for y in "ab"):
        picture(folder / client / label / "1.png", value=place)
    return folder


def test_mixed_sizes_name_the_odd_one_and_the_option_that_helps(tmp_path: Path) -> None:
    picture(folder_of_images(tmp_path) / "q" / "b" / "odd.png", (6, 5), 9)
    with pytest.raises(DataError, match=r"odd\.png: has 6 x 5 pixels, and 4 images have 4 x 4 .* --resize 4 4"):
        read(tmp_path, Options())
    assert read(tmp_path, Options(resize=(3, 2))).gathered().shape == (5, 1, 2, 3)


def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path)
    (folder / "r" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="client 'r' has no images"):
        read(folder, Options())
    picture(folder / "r" / "a" / "same.png", value=1)
    with pytest.raises(DataError, match=r"same\.png: is the same file as .*1\.png; .*--allow-duplicates"):
        read(folder, Options())
    assert len(read(folder, Options(allow_duplicates=True))) == 5
    (folder / "r" / "a" / "same.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    with pytest.raises(DataError, match=r"same\.png"):
        read(folder, Options())


def test_images_without_a_class_belong_to_clients_without_labels(tmp_path: Path) -> None:
    picture(folder_of_images(tmp_path) / "r" / "1.png", value=99)
    draft = read(tmp_path, Options())
    assert labels(draft) == ["a", "b", "a", "b", None]
    assert clients(draft)[-1] == "r"


def test_one_image_in_colour_makes_all_of_them_so(tmp_path: Path) -> None:
    picture(folder_of_images(tmp_path) / "q" / "b" / "colour.png", value=200, mode="RGB")
    assert read(tmp_path, Options()).form.shape == (3, 4, 4)


def test_a_column_of_lists_is_an_embedding_and_images_may_be_bytes(tmp_path: Path) -> None:
    vectors = [[float(i), 1.0, 2.0] for i in range(6)]
    draft = read(table(tmp_path, f=None, embedding=vectors), NAMED)
    assert draft.form == Vectors(features=("embedding[0]", "embedding[1]", "embedding[2]"))
    np.testing.assert_array_equal(draft.gathered(), np.array(vectors, np.float32))
    picture(tmp_path / "one.png", value=7)
    content = (tmp_path / "one.png").read_bytes()
    for cell in (content, {"bytes": content, "path": None}, "one.png"):
        images = read(table(tmp_path, picture=[cell] * 6), Options("y", "who", image="picture"))
        assert (images.gathered() == 7).all()
    with pytest.raises(DataError, match="not a file below the table's folder"):
        read(table(tmp_path, picture=["../one.png"] * 6), Options("y", "who", image="picture"))


def test_words_become_tokens_and_lists_of_tokens_are_padded(tmp_path: Path) -> None:
    said = ["One two", "two one", "three", "x", "one, TWO!", "y " * 99]
    words = read(table(tmp_path, t=said), Options("y", "who", text="t", length=4, vocabulary=1000))
    x = words.gathered()
    assert isinstance(words.form, Tokens)
    assert x[0].tolist() == x[4].tolist() == x[1, [1, 0, 2, 3]].tolist()
    assert (x[5] > 0).all()
    lists = read(table(tmp_path, t=[[1, 2], [3], [9], [4], [5], [6, 7, 8]]), Options("y", "who", tokens="t"))
    assert lists.form == Tokens(length=3, vocabulary=10, column="t")
    assert lists.gathered()[1].tolist() == [3, 0, 0]
