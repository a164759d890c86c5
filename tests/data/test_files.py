"""A user's own files: every format gives the same pixels, and what does not fit is named."""

import gzip
import io
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from upfl.data.files import from_array, load_labelled, load_unlabelled
from upfl.data.samples import Samples
from upfl.errors import ConfigError, DataError

GREY, COLOUR = (1, 8, 6), (3, 8, 6)  # not square: swapped sides show
CLASSES = ("cat", "dog", "emu")


def pixels(shape: tuple[int, int, int], count: int = 4) -> NDArray[np.uint8]:
    """[n, h, w] or [n, h, w, c]"""
    channels, height, width = shape
    values = np.random.default_rng(5).integers(0, 256, (count, height, width, channels), np.uint8)
    return values[..., 0] if channels == 1 else values


def save_images(folder: Path, images: NDArray[np.uint8], suffix: str = ".png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}{suffix}")
    return folder


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def assert_holds(samples: Samples, expected: NDArray[np.uint8]) -> None:
    channels_last = expected if expected.ndim == 4 else expected[..., None]
    assert samples.x.dtype == np.uint8
    np.testing.assert_array_equal(samples.x, channels_last.transpose(0, 3, 1, 2))
    assert samples.scale == 255
    assert len(samples.names) == len(samples) == len(expected)


@pytest.mark.parametrize("shape", [GREY, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tiff", ".ppm"])
def test_image_files_give_their_pixels_in_the_order_of_their_names(
    shape: tuple[int, int, int], suffix: str, tmp_path: Path
) -> None:
    expected = pixels(shape)
    samples = load_unlabelled(save_images(tmp_path / "data", expected, suffix), shape)
    assert_holds(samples, expected)
    assert samples.names == tuple(f"{i}{suffix}" for i in range(4))
    one = load_unlabelled(tmp_path / "data" / f"2{suffix}", shape)
    assert_holds(one, expected[2:3])


@pytest.mark.parametrize("shape", [GREY, COLOUR], ids=["grey", "colour"])
def test_arrays_give_their_pixels_in_any_layout_that_is_unmistakable(
    shape: tuple[int, int, int], tmp_path: Path
) -> None:
    expected = pixels(shape)
    channels_last = expected if expected.ndim == 4 else expected[..., None]
    layouts: list[NDArray[Any]] = [channels_last, channels_last.transpose(0, 3, 1, 2), expected]
    layouts.append(expected.astype(np.int64))
    if shape == GREY:
        layouts.append(expected.reshape(4, -1))
    for i, layout in enumerate(layouts):
        np.save(tmp_path / f"{i}.npy", layout)
        assert_holds(load_unlabelled(tmp_path / f"{i}.npy", shape), expected)
        np.savez(tmp_path / f"{i}.npz", x=layout, more=np.zeros(3))
        assert_holds(load_unlabelled(tmp_path / f"{i}.npz", shape), expected)
    np.savez_compressed(tmp_path / "only.npz", anything=expected)
    assert_holds(load_unlabelled(tmp_path / "only.npz", shape), expected)


def test_idx_files_give_their_pixels(tmp_path: Path) -> None:
    expected = pixels(GREY)
    (tmp_path / "any-name").write_bytes(idx_bytes(expected))
    (tmp_path / "mine.gz").write_bytes(gzip.compress(idx_bytes(expected)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train-images-idx3-ubyte").write_bytes(idx_bytes(expected))
    for path in ("any-name", "mine.gz", "folder"):
        assert_holds(load_unlabelled(tmp_path / path, GREY), expected)


def test_floats_are_fractions_of_full_intensity() -> None:
    values = pixels(GREY) / 255
    samples = from_array(values, GREY)
    assert samples.scale == 1
    np.testing.assert_array_equal(samples.x[:, 0], values.astype(np.float32))


def test_integers_run_to_the_scale_of_the_data_set() -> None:
    values = np.full((2, 8, 6), 16)
    assert from_array(values, GREY, 16.0).scale == 16
    with pytest.raises(DataError, match=r"sample 0 has \[17, 17\].*integers from 0 to 16"):
        from_array(values + 1, GREY, 16.0)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((3, 6, 8), np.uint8), r"shape \[3, 6, 8\].*8 x 6 pixels with grey values"),
        (np.zeros((3, 8, 6, 3), np.uint8), r"shape \[3, 8, 6, 3\]"),
        (np.zeros((8, 6), np.uint8), r"shape \[8, 6\]"),
        (np.zeros((48,), np.uint8), r"shape \[48\]"),
        (np.zeros((), np.uint8), r"shape \[\]"),
        (np.zeros((0, 8, 6), np.uint8), "no samples"),
        (np.full((3, 8, 6), np.nan), "sample 0 has a value that is not a number"),
        (np.full((3, 8, 6), np.inf), r"sample 0 has \[inf, inf\].*floats from 0 to 1"),
        (np.full((3, 8, 6), 2.0), r"\[2, 2\].*floats from 0 to 1, or integers from 0 to 255 .*astype\('uint8'\)"),
        (np.full((3, 8, 6), -1), r"\[-1, -1\].*integers from 0 to 255"),
        (np.full((3, 8, 6), 1j), "type complex128"),
        (np.full((3, 8, 6), "a"), "type <U1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(array: NDArray[Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^x: .*{says}"):
        from_array(array, GREY)
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=r"a\.npy: "):
        load_unlabelled(tmp_path / "a.npy", GREY)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def test_pickled_arrays_are_never_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([Harmful()], object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array([Harmful()], object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(DataError, match=f"{name}: cannot be used: it holds pickled objects"):
            load_unlabelled(tmp_path / name, GREY)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(DataError, match=r"text\.npy: cannot be used: not a NumPy file"):
        load_unlabelled(tmp_path / "text.npy", GREY)


def test_a_file_that_is_no_image_is_left_out_and_named(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "data", pixels(GREY))
    (folder / "notes.txt").write_text("mine")
    (folder / ".DS_Store").write_bytes(b"hidden")
    (folder / "link.png").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.png")
    samples = load_unlabelled(folder, GREY)
    assert_holds(samples, pixels(GREY))
    assert set(samples.skipped) == {"notes.txt", "link.png", "pipe.png"}


def test_sub_folders_are_read_links_to_folders_are_not(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "data" / "b", pixels(GREY)).parent
    (folder / "a").symlink_to(folder)
    (folder / "0.png").symlink_to(folder / "b" / "3.png")
    samples = load_unlabelled(folder, GREY)
    assert samples.names == ("0.png", "b/0.png", "b/1.png", "b/2.png", "b/3.png")
    assert samples.skipped == ("a",)


def test_grey_serves_colour_and_equal_channels_are_grey(tmp_path: Path) -> None:
    grey = pixels(GREY)
    save_images(tmp_path / "grey", grey)
    save_images(tmp_path / "equal", np.repeat(grey[..., None], 3, axis=3))
    repeated = load_unlabelled(tmp_path / "grey", COLOUR).x
    np.testing.assert_array_equal(repeated, np.repeat(grey[:, None], 3, axis=1))
    assert_holds(load_unlabelled(tmp_path / "equal", GREY), grey)


def saved(image: Image.Image, folder: Path, name: str = "odd.png", **options: Any) -> Path:
    save_images(folder, pixels(GREY))
    image.save(folder / name, **options)
    return folder


def test_images_that_do_not_fit_are_named(tmp_path: Path) -> None:
    transparent = np.zeros((8, 6, 4), np.uint8)
    cases: list[tuple[Path, str]] = [
        (saved(Image.fromarray(pixels(COLOUR)[0]), tmp_path / "colour"), r"odd\.png: is in colour"),
        (saved(Image.new("L", (8, 6)), tmp_path / "turned"), r"odd\.png: has 8 x 6 pixels .* takes 6 x 8"),
        (saved(Image.new("L", (28, 28)), tmp_path / "large"), r"odd\.png: has 28 x 28 pixels"),
        (saved(Image.new("I;16", (6, 8)), tmp_path / "deep"), r"odd\.png: has more than 8 bits"),
        (saved(Image.fromarray(transparent), tmp_path / "clear"), r"odd\.png: is transparent"),
    ]
    frames = [Image.new("L", (6, 8), grey) for grey in (0, 255)]
    cases.append((saved(frames[0], tmp_path / "gif", "odd.gif", save_all=True, append_images=frames[1:]), "frames"))
    for folder, says in cases:
        with pytest.raises(DataError, match=says):
            load_unlabelled(folder, GREY)


def test_a_turned_photograph_is_put_upright(tmp_path: Path) -> None:
    upright = pixels(COLOUR)[:1]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    (tmp_path / "data").mkdir()
    Image.fromarray(np.rot90(upright[0])).save(tmp_path / "data" / "photo.png", exif=exif)
    assert_holds(load_unlabelled(tmp_path / "data", COLOUR), upright)


def test_a_bomb_is_refused_before_its_pixels_are_made(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.new("L", (6, 8)).save(content, "PNG")
    header = struct.pack(">II", 60000, 60000)
    bomb = content.getvalue().replace(struct.pack(">II", 6, 8), header)
    chunk = bomb[12:29]
    bomb = bomb[:29] + struct.pack(">I", zlib.crc32(chunk)) + bomb[33:]
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(DataError, match=r"bomb\.png.*decompression bomb"):
        load_unlabelled(tmp_path, GREY)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".gif", ".bmp", ".tiff", ".webp"])
def test_truncated_images_are_named(suffix: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    folder = save_images(tmp_path / "data", noise[None], suffix)
    content = (folder / f"0{suffix}").read_bytes()
    for length in (0, 20, len(content) // 2):
        (folder / f"0{suffix}").write_bytes(content[:length])
        with pytest.raises(DataError, match=rf"0\{suffix}: "):
            load_unlabelled(folder, (3, 64, 64))


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), suffix=st.sampled_from([".png", ".jpg", ".gif", ".npz"]))
def test_a_flipped_bit_gives_pixels_or_a_data_error(
    place: int, bit: int, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    file = folder / f"a{suffix}"
    if suffix == ".npz":
        np.savez_compressed(file, x=pixels(GREY))
    else:
        Image.fromarray(pixels(GREY)[0]).save(file)
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    file.write_bytes(content)
    try:
        samples = load_unlabelled(file, GREY)
    except DataError:
        return
    assert samples.x.shape[1:] == GREY


def test_folders_and_files_without_samples_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no image")
    for path, says in (
        ("empty", "empty: there are no images"),
        ("texts", r"texts: there are no images in it \(found a.txt\)"),
        ("texts/a.txt", r"a\.txt: neither an image nor"),
        ("nowhere", "nowhere: cannot be read: No such file"),
    ):
        with pytest.raises(DataError, match=says):
            load_unlabelled(tmp_path / path, GREY)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_unlabelled(tmp_path / "pipe", GREY)


def test_archives_are_refused_by_what_they_would_unpack_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 8, 6), np.uint8))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx_bytes(np.zeros((1000, 8, 6), np.uint8))))
    monkeypatch.setenv("UPFL_LIMIT_UNPACKED", "40K")
    for name in ("a.npz", "a.gz"):
        with pytest.raises(
            DataError, match=rf"{name}: .* more than 40 KiB; if you trust it, UPFL_LIMIT_UNPACKED=\.\.\."
        ):
            load_unlabelled(tmp_path / name, GREY)
    monkeypatch.setenv("UPFL_LIMIT_UNPACKED", "1MiB")
    for name in ("a.npz", "a.gz"):
        assert len(load_unlabelled(tmp_path / name, GREY)) == 1000
    monkeypatch.setenv("UPFL_LIMIT_UNPACKED", "much")
    with pytest.raises(ConfigError, match="UPFL_LIMIT_UNPACKED is 'much': give a number of bytes"):
        load_unlabelled(tmp_path / "a.npz", GREY)


def test_an_archive_without_x_says_what_it_has(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=pixels(GREY), y=np.zeros(4))
    with pytest.raises(DataError, match="has the arrays images, y; name the images `x`"):
        load_unlabelled(tmp_path / "a.npz", GREY)
    with zipfile.ZipFile(tmp_path / "none.npz", "w"):
        pass
    with pytest.raises(DataError, match=r"the arrays \(none\)"):
        load_unlabelled(tmp_path / "none.npz", GREY)


# With labels


def test_labelled_formats_agree(tmp_path: Path) -> None:
    images, labels = pixels(GREY, 6), np.array([0, 0, 2, 2, 2, 2])
    save_images(tmp_path / "folder" / "cat", images[:2])
    save_images(tmp_path / "folder" / "emu", images[2:])
    np.savez(tmp_path / "a.npz", x=images, y=labels)
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
    (tmp_path / "idx" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels.astype(np.uint8))))
    for path in ("folder", "a.npz", "idx", "idx/t10k-images-idx3-ubyte.gz"):
        samples = load_labelled(tmp_path / path, GREY, CLASSES)
        assert_holds(samples, images)
        assert samples.labels is not None
        assert samples.labels.dtype == np.int64
        np.testing.assert_array_equal(samples.labels, labels)


def test_labels_that_do_not_fit_are_named(tmp_path: Path) -> None:
    images = pixels(GREY)
    save_images(tmp_path / "flat", images)
    save_images(tmp_path / "other" / "dgo", images)
    np.savez(tmp_path / "none.npz", x=images)
    np.savez(tmp_path / "few.npz", x=images, y=np.zeros(3, int))
    np.savez(tmp_path / "floats.npz", x=images, y=np.zeros(4))
    np.savez(tmp_path / "beyond.npz", x=images, y=np.array([0, 1, 2, 3]))
    np.save(tmp_path / "x.npy", images)
    (tmp_path / "a-images-idx3-ubyte").write_bytes(idx_bytes(images))
    for path, says in (
        ("flat", r"0\.png: has no label"),
        ("other", "unknown class 'dgo'; did you mean dog"),
        ("none.npz", "no array y"),
        ("few.npz", r"4 images need.*int64 \[3\]"),
        ("floats.npz", "float64"),
        ("beyond.npz", "labels from 0 to 3; there are 3 classes"),
        ("x.npy", "holds no labels"),
        ("a-images-idx3-ubyte", "labels are not beside it"),
    ):
        with pytest.raises(DataError, match=says):
            load_labelled(tmp_path / path, GREY, CLASSES)
