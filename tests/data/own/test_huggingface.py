"""Folders as Hugging Face's `save_to_disk` writes them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from upfl.data.own.options import Options
from upfl.data.own.reading import read
from upfl.errors import DataError


def saved(folder: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    """What `Dataset.save_to_disk` leaves: Arrow streams, and two files that describe them."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    for number, part in enumerate((table.slice(0, 3), table.slice(3))):
        with (
            pa.OSFile(str(folder / f"data-0000{number}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(part)
    names = [{"filename": f"data-0000{number}.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_indices_data_files": None}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder


COLUMNS = {"f": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "label": [0, 1, 0, 1, -1, -1], "who": [1, 1, 2, 2, 3, 3]}


def test_classes_have_the_names_that_the_features_say(tmp_path: Path) -> None:
    named = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    draft = read(saved(tmp_path / "set", COLUMNS, named), Options(client="who"))
    assert draft.class_names == ("cat", "dog")
    assert draft.labels.tolist() == [0, 1, 0, 1, -1, -1]
    assert draft.gathered()[:, 0].tolist() == COLUMNS["f"]


def test_the_splits_of_a_dataset_dict_are_taken_together(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / "all" / split, COLUMNS)
    (tmp_path / "all" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    draft = read(tmp_path / "all", Options(label="label", client="who"))
    assert len(draft) == len(draft.gathered()) == 12


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("state.json", "{", "state.json"),
        ("state.json", '{"_data_files": [{"filename": "../x.arrow"}]}', "does not name"),
        ("state.json", '{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow"),
        ("data-00001.arrow", "no arrow", "data-00001.arrow"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, file: str, content: str, word: str) -> None:
    folder = saved(tmp_path / "set", COLUMNS)
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=word):
        list(read(folder, Options(label="label", client="who")).parts())
