"""What the canonical data sets are: their files and digests, who publishes them, their classes and normalisation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from upfl.data import formats
from upfl.data.formats import Columns, Shape


@dataclass(frozen=True)
class File:
    """A canonical file. Size and digest are of its decompressed content, for mirrors and Debian compress it anew."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class Download:
    """A published file as it is transferred: a .gz is kept as it is, of a .tar.gz the data set's files are unpacked."""

    urls: tuple[str, ...]  # the first that answers is taken
    size: int
    md5: str


@dataclass(frozen=True)
class Specification:
    title: str
    folder: str  # the name that the published archive gives it
    decode: Callable[[bytes, Shape], Columns]
    shape: Shape
    class_names: tuple[str, ...]
    grouped: bool = False  # its samples have superclasses or writers
    files: tuple[File, ...] = ()  # in order, the training set first; none: whatever fits `pattern`
    pattern: str = ""
    train_count: int | None = None  # none: there is no canonical test set
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # how to get what cannot be downloaded
    system_folders: tuple[Path, ...] = ()


def _mirrored(bases: tuple[str, ...], name: str, size: int, md5: str) -> Download:
    return Download(tuple(base + name for base in bases), size, md5)


_DIGITS = tuple("0123456789")

_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

_FASHION_MIRRORS = ("https://storage.googleapis.com/tensorflow/tf-keras-datasets/",)

_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""

CATALOG: dict[str, Specification] = {
    "mnist": Specification(
        title="MNIST",
        folder="mnist",
        decode=formats.idx,
        shape=(1, 28, 28),
        class_names=_DIGITS,
        files=(
            File("train-images-idx3-ubyte", 47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
            File("train-labels-idx1-ubyte", 60_008, "a25bea736e30d166cdddb491f175f624"),
            File("t10k-images-idx3-ubyte", 7_840_016, "2646ac647ad5339dbf082846283269ea"),
            File("t10k-labels-idx1-ubyte", 10_008, "27ae3e4e09519cfbb04c329615203637"),
        ),
        train_count=60_000,
        mean=(0.1307,),
        std=(0.3081,),
        downloads=(
            _mirrored(_MNIST_MIRRORS, "train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            _mirrored(_MNIST_MIRRORS, "train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            _mirrored(_MNIST_MIRRORS, "t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            _mirrored(_MNIST_MIRRORS, "t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
    "fashion_mnist": Specification(
        title="Fashion-MNIST",
        folder="fashion_mnist",
        decode=formats.idx,
        shape=(1, 28, 28),
        class_names=(
            *("T-shirt", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
        files=(
            File("train-images-idx3-ubyte", 47_040_016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
            File("train-labels-idx1-ubyte", 60_008, "9018921c3c673c538a1fc5bad174d6f9"),
            File("t10k-images-idx3-ubyte", 7_840_016, "8181f5470baa50b63fa0f6fddb340f0a"),
            File("t10k-labels-idx1-ubyte", 10_008, "15d484375f8d13e6eb1aabb0c3f46965"),
        ),
        train_count=60_000,
        downloads=(
            _mirrored(_FASHION_MIRRORS, "train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            _mirrored(_FASHION_MIRRORS, "train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            _mirrored(_FASHION_MIRRORS, "t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            _mirrored(_FASHION_MIRRORS, "t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        system_folders=(Path("/usr/share/datasets/fashion-mnist"),),  # Debian's package dataset-fashion-mnist
    ),
    "cifar10": Specification(
        title="CIFAR-10",
        folder="cifar-10-batches-bin",
        decode=formats.cifar10,
        shape=(3, 32, 32),
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        files=(
            File("data_batch_1.bin", 30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
            File("data_batch_2.bin", 30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
            File("data_batch_3.bin", 30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
            File("data_batch_4.bin", 30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
            File("data_batch_5.bin", 30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
            File("test_batch.bin", 30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
        ),
        train_count=50_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        downloads=(
            Download(
                ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                170_052_171,
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
    ),
    "cifar100": Specification(
        title="CIFAR-100",
        folder="cifar-100-binary",
        decode=formats.cifar100,
        shape=(3, 32, 32),
        class_names=tuple(_CIFAR100_CLASSES.split()),
        grouped=True,
        files=(
            File("train.bin", 153_700_000, "6172c7755cfe09b2fe270c85cebc1b15"),
            File("test.bin", 30_740_000, "4499cfba6c016c1be1438163640a0898"),
        ),
        train_count=50_000,
        mean=(0.5071, 0.4865, 0.4409),  # of its training set, as computed from train.bin
        std=(0.2673, 0.2564, 0.2762),
        downloads=(
            Download(
                ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
                168_513_733,
                "03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
    ),
    "femnist": Specification(
        title="FEMNIST",
        folder="femnist",
        decode=formats.leaf,
        shape=(1, 28, 28),
        class_names=tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
        grouped=True,
        pattern="*.json",
        mean=(0.1307,),
        std=(0.3081,),
        by_hand=(
            "FEMNIST is not published as files: make them with LEAF (https://github.com/TalwalkarLab/leaf, "
            "in data/femnist: ./preprocess.sh -s niid --sf 0.1 -k 0 -t sample) and copy data/all_data/*.json"
        ),
    ),
}
