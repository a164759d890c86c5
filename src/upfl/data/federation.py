"""A federation: the training clients with their train and validation splits, and the new clients."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upfl.data.partition import Holdings, Indices, Partition, by_writer, dirichlet, iid, pathological, superclass
from upfl.data.sources import Source
from upfl.errors import ConfigError, DataError
from upfl.randomness import seed_of

Role = Literal["training", "new"]
ROLES: tuple[Role, ...] = ("training", "new")


@dataclass(frozen=True)
class Clients(Holdings):
    """What each client holds, in random order, and how it uses it."""

    train_counts: Indices  # the first so many of a client's samples are its train split, the others validate
    angles: NDArray[np.float64]  # degrees counter-clockwise by which a client's images are turned

    def all(self, client: int) -> Indices:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client}: there are {len(self)}, counted from 0")
        return self[client]

    def train(self, client: int) -> Indices:
        return self.all(client)[: self.train_counts[client]]

    def validation(self, client: int) -> Indices:
        return self.all(client)[self.train_counts[client] :]

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Which training clients never train: they have samples, and all of them validate."""
        held: NDArray[np.bool_] = (self.train_counts == 0) & (self.sizes() > 0)
        return held

    def counts(self, split: Literal["train", "validation"]) -> Indices:
        """How many samples each client has in a split."""
        return self.train_counts if split == "train" else self.sizes() - self.train_counts


@dataclass(frozen=True)
class Federation:
    source: Source
    training: Clients
    new: Clients  # without a train split; their labels are for scoring alone
    public: Indices
    notes: tuple[str, ...]  # what whoever reads a result should know about the split
    seed: int = 0
    architectures: tuple[str, ...] = ()  # names of the models among which clients differ

    def architecture(self, role: Role, client: int) -> str:
        """The model that a client has: each with equal probability, a function of the seed and the client."""
        if not self.architectures:
            return ""
        return self.architectures[seed_of(self.seed, "architecture", role, client) % len(self.architectures)]


def build_federation(source: Source, partition: Partition, seed: int, architectures: Iterable[str] = ()) -> Federation:
    """Split a data set among clients. The result depends on the partition, the seed and the architectures' names."""
    if seed < 0:
        raise ConfigError(f"the partition seed must not be negative, and it is {seed}")
    pool, public = _draw_pool(source, partition, seed)
    holdings = dict(zip(("training", "new"), _deal(source, partition, pool, seed), strict=True))
    notes = []
    for role, dealt in holdings.items():
        holdings[role] = held = dealt.chosen(np.flatnonzero(dealt.sizes()))
        if not len(held):
            raise DataError(f"no sample is left for {role} clients: take more samples or fewer clients")
        if empty := len(dealt) - len(held):
            notes.append(f"{empty} of {len(dealt)} {role} clients hold no samples and are left out")
    training = _held_out(_training_clients(holdings["training"], partition, seed), partition.held_out, seed)
    training = _left(training, partition.without)
    new = _new_clients(holdings["new"], partition, seed)
    notes += _notes(source, partition, training, new)
    return Federation(source, training, new, public, tuple(notes), seed, tuple(architectures))


def with_newcomers(federation: Federation, partition: Partition, changes: Mapping[str, Any]) -> Federation:
    """The same training clients with the new clients of a partition that differs in some fields."""
    other = build_federation(federation.source, partition.revised(changes), federation.seed, federation.architectures)
    if not _same(other.training, federation.training):
        raise ConfigError(f"{dict(changes)} changes the training clients, too: train anew for that")
    return other


def _same(ours: Clients, theirs: Clients) -> bool:
    return all(
        np.array_equal(getattr(ours, name), getattr(theirs, name))
        for name in ("indices", "offsets", "train_counts", "angles")
    )


def class_counts(federation: Federation, clients: Clients) -> NDArray[np.int64]:
    """How many samples of each class each client holds: [clients, classes]."""
    return _counts(federation.source.labels, clients, len(federation.source.class_names))


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """A stream for each purpose, so that one setting of the partition does not change what another one draws."""
    return np.random.default_rng(seed_of(seed, "partition", purpose))


def _draw_pool(source: Source, partition: Partition, seed: int) -> tuple[Indices, Indices]:
    """The samples that clients share out, and the public ones, both in the data set's order."""
    pool = np.arange(len(source.labels))
    if partition.samples is not None:
        if partition.samples > len(pool):
            raise DataError(f"samples = {partition.samples} is more than the {len(pool)} that {source.name} has")
        pool = np.sort(_generator(seed, "pool").choice(pool, partition.samples, replace=False))
    count = round(partition.public * len(pool))
    drawn = np.zeros(len(pool), np.bool_)
    drawn[_generator(seed, "public").permutation(len(pool))[:count]] = True
    return pool[~drawn], pool[drawn]


def _deal(source: Source, partition: Partition, pool: Indices, seed: int) -> tuple[Holdings, Holdings]:
    """What each training client and each new client holds."""
    if partition.kind == "dirichlet":
        return _deal_dirichlet(source, partition, pool, seed)
    rng = _generator(seed, "training")
    match partition.kind:
        case "pathological":
            labels = source.labels[pool]
            holdings = pathological(
                labels, partition.clients, partition.labels_per_client, partition.distinct_labels, rng
            )
        case "superclass":
            holdings = superclass(_groups(source, "superclasses")[pool], partition.clients, rng)
        case "writer":
            holdings = by_writer(_groups(source, "writers")[pool], partition.clients, partition.minimum_samples, rng)
        case "iid":
            holdings = iid(len(pool), partition.clients, rng)
    order = _generator(seed, "roles").permutation(len(holdings))
    half = (len(holdings) + 1) // 2
    held = Holdings(pool[holdings.indices], holdings.offsets)
    return held.chosen(order[:half]), held.chosen(order[half:])


def _deal_dirichlet(source: Source, partition: Partition, pool: Indices, seed: int) -> tuple[Holdings, Holdings]:
    """The canonical training set goes to training clients, the test set to new ones; without one, random halves do."""
    if source.train_count < len(source.labels):
        is_training = pool < source.train_count
    else:
        is_training = _generator(seed, "roles").permutation(len(pool)) < (len(pool) + 1) // 2
    parts = (
        (pool[is_training], partition.alpha_training, "training"),
        (pool[~is_training], partition.alpha_new, "new"),
    )
    dealt = []
    for part, alpha, purpose in parts:
        holdings = dirichlet(source.labels[part], partition.clients // 2, alpha, _generator(seed, purpose))
        dealt.append(Holdings(part[holdings.indices], holdings.offsets))
    return dealt[0], dealt[1]


def _groups(source: Source, what: str) -> Indices:
    if source.groups is None:
        raise DataError(f"{source.name} has no {what}: choose another kind of partition")
    return source.groups


def validation_sizes(sizes: Indices, fraction: float) -> Indices:
    """How many of so many samples a client validates on: at least one, unless nobody does, and never all."""
    validation = np.maximum(np.rint(fraction * sizes).astype(np.int64), int(fraction > 0))
    kept: Indices = np.minimum(validation, sizes - 1)  # a client always has something to train on
    return kept


def _training_clients(holdings: Holdings, partition: Partition, seed: int) -> Clients:
    sizes = holdings.sizes()
    validation = validation_sizes(sizes, partition.validation)
    angles = _angles(partition.rotations_training, len(holdings), _generator(seed, "angles training"))
    return _clients(holdings.shuffled(_generator(seed, "validation")), sizes - validation, angles)


def _held_out(clients: Clients, fraction: float, seed: int) -> Clients:
    """The same clients, of whom a fraction, drawn at random, train on nothing: all that they hold validates."""
    if not fraction:
        return clients
    count = max(round(fraction * len(clients)), 1)
    if count >= len(clients):
        raise ConfigError(
            f"partition.held_out = {fraction} leaves none of the {len(clients)} training clients to train"
        )
    train_counts = clients.train_counts.copy()
    train_counts[_generator(seed, "held out").permutation(len(clients))[:count]] = 0
    return _clients(clients, train_counts, clients.angles)


def _left(clients: Clients, without: Iterable[int]) -> Clients:
    """The same clients, of whom some hold nothing any more: numbers, and all that is drawn by them, stay."""
    gone = np.array(sorted(set(without)), np.int64)
    if not len(gone):
        return clients
    if gone[-1] >= len(clients):
        raise ConfigError(
            f"partition.without: there is no training client {gone[-1]}; there are {len(clients)}, from 0"
        )
    if len(gone) == len(clients):
        raise ConfigError("partition.without: no training client is left")
    sizes, train_counts = clients.sizes(), clients.train_counts.copy()
    sizes[gone] = train_counts[gone] = 0
    return _clients(clients.first(sizes), train_counts, clients.angles)


def _new_clients(holdings: Holdings, partition: Partition, seed: int) -> Clients:
    # A larger fraction contains every smaller one. The order must not give labels away either.
    kept = np.maximum(np.rint(partition.new_fraction * holdings.sizes()).astype(np.int64), 1)
    angles = _angles(partition.rotations_new, len(holdings), _generator(seed, "angles new"))
    shuffled = holdings.shuffled(_generator(seed, "subsample"))
    return _clients(shuffled.first(kept), np.zeros(len(holdings), np.int64), angles)


def _angles(choices: tuple[float, ...], count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.choice(np.array(choices or (0.0,)), count)


def _clients(holdings: Holdings, train_counts: Indices, angles: NDArray[np.float64]) -> Clients:
    for array in (holdings.indices, holdings.offsets, train_counts, angles):
        array.flags.writeable = False
    return Clients(holdings.indices, holdings.offsets, train_counts, angles)


def _counts(values: Indices, clients: Clients, width: int) -> NDArray[np.int64]:
    owner = np.repeat(np.arange(len(clients)), clients.sizes())
    flat = np.bincount(owner * width + values[clients.indices], minlength=len(clients) * width)
    return flat.reshape(len(clients), width)


def _notes(source: Source, partition: Partition, training: Clients, new: Clients) -> Iterator[str]:
    for role, clients in (("training", training), ("new", new)):
        classes = np.count_nonzero(_counts(source.labels, clients, len(source.class_names)), axis=1)
        if single := int((classes == 1).sum()):
            yield f"{single} of {len(clients)} {role} clients hold a single class"
    if names := [source.class_names[label] for label in _only_new(source.labels, training, new)]:
        yield f"classes that only new clients hold: {', '.join(names)}"
    superclasses = source.groups if partition.kind == "superclass" else None
    if superclasses is not None and (numbers := _only_new(superclasses, training, new)):
        yield f"superclasses that only new clients hold: number {', '.join(map(str, numbers))}"
    if held_out := int(training.held_out.sum()):
        yield f"{held_out} of {len(training)} training clients never train: they validate as newcomers"
    unvalidated = int((training.sizes() == training.train_counts).sum())
    if unvalidated and partition.validation > 0:
        yield f"{unvalidated} of {len(training)} training clients have one sample and so no validation data"


def _only_new(values: Indices, training: Clients, new: Clients) -> list[int]:
    only: list[int] = np.setdiff1d(values[new.indices], values[training.indices]).tolist()
    return only
