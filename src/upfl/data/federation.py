"""A federation: the training clients with their train and validation splits, and the new clients."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upfl.data.draft import MISSING
from upfl.data.forms import Pixels, Vectors
from upfl.data.partition import Holdings, Indices, Partition, by_client, dirichlet, iid, pathological, shard, superclass
from upfl.data.source import Source
from upfl.data.standardize import standardized, sums_of
from upfl.errors import ConfigError, DataError
from upfl.randomness import seed_of
from upfl.suggest import unknown

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

    @cached_property
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
    named: Mapping[Role, Indices] = field(default_factory=dict)  # which of the source's clients each one is

    def name(self, role: Role, client: int) -> str | None:
        """What the data call a client, where they name clients."""
        if role not in self.named or self.source.clients is None:
            return None
        return bytes(self.source.clients[self.named[role][client]]).decode("utf-8", "replace")

    def names(self, role: Role, most: int | None = None) -> list[str]:
        """What the data call the clients of a role, or the first of them; empty where they name none."""
        found = (self.name(role, client) for client in range(len(self.named.get(role, ())))[:most])
        return [name for name in found if name is not None]

    def roles(self) -> tuple[tuple[Role, Clients], ...]:
        return ("training", self.training), ("new", self.new)

    def has_labels(self, newcomer: int) -> bool:
        """Whether a new client can be scored at all."""
        return bool((self.source.labels[self.new.all(newcomer)] != MISSING).any())

    def architecture(self, role: Role, client: int) -> str:
        """The model that a client has: each with equal probability, a function of the seed and the client."""
        if not self.architectures:
            return ""
        return self.architectures[seed_of(self.seed, "architecture", role, client) % len(self.architectures)]


def build_federation(source: Source, partition: Partition, seed: int, architectures: Iterable[str] = ()) -> Federation:
    """Split a data set among clients. The result depends on the partition, the seed and the architectures' names."""
    if seed < 0:
        raise ConfigError(f"the partition seed must not be negative, and it is {seed}")
    if (partition.rotations_training or partition.rotations_new) and not isinstance(source.form, Pixels):
        raise ConfigError(f"partition.rotations: {source.name} has {source.form.noun}, and images alone can be turned")
    pool, public = _draw_pool(source, partition, seed)
    dealt_out, named = _deal(source, partition, pool, seed)
    holdings = dict(zip(ROLES, dealt_out, strict=True))
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
    if isinstance(source.form, Vectors) and not source.form.mean:
        seen = training.first(training.train_counts).indices
        source = replace(source, form=standardized(source.form, sums_of(source.x, seen)))
    return Federation(source, training, new, public, tuple(notes), seed, tuple(architectures), named)


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
    if count == len(pool):
        raise DataError(f"partition.public takes all {count} samples and leaves none to clients: lower it")
    drawn = np.zeros(len(pool), np.bool_)
    drawn[_generator(seed, "public").permutation(len(pool))[:count]] = True
    return pool[~drawn], pool[drawn]


Dealt = tuple[Holdings, Holdings]  # what each training client and each new client holds


def _deal(source: Source, partition: Partition, pool: Indices, seed: int) -> tuple[Dealt, dict[Role, Indices]]:
    """What each client holds; and which of the clients that the data name each one is, where they do."""
    if partition.kind == "natural":
        return _deal_natural(source, partition, pool, seed)
    if (source.labels[pool] == MISSING).any():
        raise DataError(f"{source.name}: some samples have no label, as newcomers' may: take kind = 'natural'")
    if partition.kind == "dirichlet":
        return _deal_dirichlet(source, partition, pool, seed), {}
    rng = _generator(seed, "training")
    match partition.kind:
        case "pathological":
            labels = source.labels[pool]
            holdings = pathological(
                labels, partition.clients, partition.labels_per_client, partition.distinct_labels, rng
            )
        case "superclass":
            holdings = superclass(_groups(source, "superclasses")[pool], partition.clients, rng)
        case "shard":
            holdings = shard(source.labels[pool], partition.clients, partition.shards_per_client, rng)
        case "iid":
            holdings = iid(len(pool), partition.clients, rng)
    order = _generator(seed, "roles").permutation(len(holdings))
    trained = len(holdings) - (partition.new_clients or 0)
    held = Holdings(pool[holdings.indices], holdings.offsets)
    return (held.chosen(order[:trained]), held.chosen(order[trained:])), {}


def _deal_natural(source: Source, partition: Partition, pool: Indices, seed: int) -> tuple[Dealt, dict[Role, Indices]]:
    """Clients as the data name them. Who has samples without labels can only be a newcomer."""
    groups, rng = _groups(source, "clients")[pool], _generator(seed, "training")
    roles = _generator(seed, "roles")
    unlabelled = np.unique(groups[source.labels[pool] == MISSING])
    if partition.new_clients is not None and isinstance(partition.new, float):
        holdings, drawn = by_client(groups, partition.clients, partition.minimum_samples, rng)
        order = roles.permutation(len(holdings))
        trained = len(holdings) - partition.new_clients
        if len(unlabelled):  # these go last
            without = np.isin(drawn[order], unlabelled)
            order = np.concatenate([order[~without], order[without]])
            if (~without).sum() < trained:
                raise DataError(
                    f"{source.name}: {without.sum()} of {len(order)} clients have samples without labels and can only "
                    f"be newcomers, and {partition.new_clients} are to be: raise partition.new"
                )
        training, new = order[:trained], order[trained:]
    else:
        chosen = _chosen_newcomers(source, partition, int(groups.max()) + 1)
        sizes = np.bincount(groups, minlength=len(chosen))
        few = np.flatnonzero(chosen & (sizes < max(partition.minimum_samples, 1)))
        if len(few) and isinstance(partition.new, tuple):
            raise DataError(f"partition.new: client '{_name(source, few[0])}' has {sizes[few[0]]} samples, too few")
        count = int(chosen.sum()) - len(few)
        if not 1 <= count < partition.clients:
            raise DataError(
                f"partition.new: {count} of {partition.clients} clients would be new; both kinds are needed"
            )
        if (wrong := unlabelled[~chosen[unlabelled]]).size:
            raise DataError(
                f"{source.name}: client '{_name(source, wrong[0])}' has samples without labels, only newcomers may; "
                "label them, leave them out, or make the client a newcomer"
            )
        least, drawn_training = partition.minimum_samples, partition.clients - count
        old, old_numbers = by_client(groups, drawn_training, least, rng, ~chosen)
        young, young_numbers = by_client(groups, count, least, roles, chosen)
        holdings = Holdings.cut(
            np.concatenate([old.indices, young.indices]), np.concatenate([old.sizes(), young.sizes()])
        )
        drawn = np.concatenate([old_numbers, young_numbers])
        training, new = np.arange(len(old)), np.arange(len(old), len(drawn))
    held = Holdings(pool[holdings.indices], holdings.offsets)
    return (held.chosen(training), held.chosen(new)), {"training": drawn[training], "new": drawn[new]}


def _chosen_newcomers(source: Source, partition: Partition, count: int) -> NDArray[np.bool_]:
    """Whether each client that the data name is a newcomer, by the list or by the data."""
    if partition.new == "column":
        if source.newcomers is None:
            raise DataError(f"{source.name}: its data do not say who is new: give partition.new a share or a list")
        return np.asarray(source.newcomers)
    assert isinstance(partition.new, tuple)
    names = source.clients if source.clients is not None else np.arange(count).astype(np.bytes_)
    numbers = {bytes(name).decode("utf-8", "replace"): number for number, name in enumerate(names)}
    chosen = np.zeros(len(names), np.bool_)
    for name in partition.new:
        if name not in numbers:
            raise ConfigError(f"partition.new: {unknown('client', name, numbers)}")
        chosen[numbers[name]] = True
    return chosen


def _name(source: Source, number: int) -> str:
    return str(number) if source.clients is None else bytes(source.clients[number]).decode("utf-8", "replace")


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
    owner, held = np.repeat(np.arange(len(clients)), clients.sizes()), values[clients.indices]
    known = held >= 0
    flat = np.bincount((owner * width + held)[known], minlength=len(clients) * width)
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
    return [value for value in only if value >= 0]
