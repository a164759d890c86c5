"""Who holds which samples: the paper's ways to split a data set among clients, as pure functions on indices.

Each function says which positions each client holds; together they hold every position once at most.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from upfl.errors import ConfigError, DataError
from upfl.suggest import unknown

Indices = NDArray[np.int64]
Kind = Literal["pathological", "shard", "superclass", "natural", "dirichlet", "iid"]
HALF = 0.5
Share = Annotated[float, Field(gt=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]

# Fields that mean something to one kind only: set with another kind, they would silently do nothing.
_KIND_OF_FIELD: dict[str, Kind] = {
    "labels_per_client": "pathological",
    "distinct_labels": "pathological",
    "shards_per_client": "shard",
    "minimum_samples": "natural",
    "alpha_training": "dirichlet",
    "alpha_new": "dirichlet",
}


class Partition(BaseModel):
    """How a data set becomes a federation. With a seed it fixes who holds what."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Kind
    clients: int = Field(ge=2, le=10_000_000, description="training and new clients together")
    new: Share | Literal["column"] | tuple[Name, ...] = Field(
        HALF, description="who is new: a share, drawn at random; natural: a list of names, or 'column', as the data say"
    )
    labels_per_client: int = Field(2, ge=1, description="pathological: the most labels that a client can have")
    distinct_labels: bool = Field(False, description="pathological: exactly that many; else shards at random")
    shards_per_client: int = Field(2, ge=1, description="shard: pieces of the data, sorted by label, for each")
    minimum_samples: int = Field(0, ge=0, description="natural: clients with fewer samples are not drawn")
    alpha_training: float = Field(0.1, ge=1e-3, le=1e6, description="dirichlet: concentration of training clients")
    alpha_new: float = Field(0.1, ge=1e-3, le=1e6, description="dirichlet: concentration of new clients")
    samples: int | None = Field(None, ge=2, description="use this many samples only, drawn at random")
    public: float = Field(0.0, ge=0, lt=1, description="fraction set aside first, as an unlabelled public set")
    validation: float = Field(0.15, ge=0, lt=1, description="fraction of a training client's data for validation")
    held_out: float = Field(
        0.0, ge=0, lt=1, description="fraction of the training clients that never train and validate as newcomers"
    )
    new_fraction: float = Field(1.0, gt=0, le=1, description="fraction of its data that a new client keeps")
    rotations_training: tuple[Annotated[float, Field(ge=-360, le=360)], ...] = Field(
        (), description="angles for training clients, degrees counter-clockwise, one drawn for each client"
    )
    rotations_new: tuple[Annotated[float, Field(ge=-360, le=360)], ...] = Field(
        (), description="angles for new clients"
    )
    without: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="training clients, by number, that hold nothing: all others hold what they would anyway"
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _known_before(cls, kind: Any) -> Any:
        return "natural" if kind == "writer" else kind  # as it was called in earlier runs

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        for name, kind in _KIND_OF_FIELD.items():
            if self.kind != kind and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} applies to kind = {kind!r} only, and kind is {self.kind!r}")
        if self.kind == "dirichlet" and self.clients % 2:
            raise ValueError(
                f"clients must be even for kind = 'dirichlet' (half train, half are new), not {self.clients}"
            )
        if self.new != HALF and self.kind == "dirichlet":
            raise ValueError("new: for kind = 'dirichlet' half of the clients are new, by alpha_new")
        if not isinstance(self.new, float) and self.kind != "natural":
            raise ValueError("new: clients have names for kind = 'natural' alone; give a share, such as 0.5")
        if self.new_clients is not None and not 1 <= self.new_clients < self.clients:
            raise ValueError(f"new: {self.new_clients} of {self.clients} clients would be new; both kinds are needed")
        if self.samples is not None and self.samples < self.clients:
            raise ValueError(f"samples = {self.samples} cannot give each of {self.clients} clients one")
        return self

    @property
    def new_clients(self) -> int | None:
        """How many clients are new; None where the data say it."""
        if self.new == "column":
            return None
        return len(set(self.new)) if isinstance(self.new, tuple) else int(self.new * self.clients)

    def revised(self, changes: Mapping[str, Any]) -> "Partition":
        """A copy with some fields changed; a new kind takes the old one's own fields back to their defaults."""
        for name in changes:
            if name not in type(self).model_fields:
                raise unknown("partition field", name, type(self).model_fields)
        kind = changes.get("kind", self.kind)
        kept = {name: value for name, value in self if _KIND_OF_FIELD.get(name, kind) == kind}
        try:
            return Partition.model_validate(kept | dict(changes))
        except ValidationError as error:
            problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
            raise ConfigError("; ".join(f"partition {place}: {text}" for place, text in problems)) from error


def own_partition(samples: int, clients: int, newcomers: int | None) -> Partition:
    """The partition of data of one's own: clients as they are named, or 20 with equal shares of all where none are."""
    if clients:
        return Partition(kind="natural", clients=clients, new=HALF if newcomers is None else "column")
    return Partition(kind="iid", clients=max(2, min(20, samples // 10)))


def default_partition(dataset: str) -> Partition:
    """The paper's partition of a data set (digits: as MNIST, with 40 clients)."""
    defaults = {
        "digits": Partition(kind="pathological", clients=40),
        "mnist": Partition(kind="pathological", clients=100),
        "fashion_mnist": Partition(kind="pathological", clients=100),
        "cifar10": Partition(kind="pathological", clients=100, distinct_labels=True),
        "cifar100": Partition(kind="superclass", clients=100),
        "femnist": Partition(kind="natural", clients=185, minimum_samples=100),
    }
    if dataset not in defaults:
        raise unknown("data set", dataset, defaults)
    return defaults[dataset]


@dataclass(frozen=True)
class Holdings:
    """What each client holds, one after another in one array: a million clients are not a million objects."""

    indices: Indices
    offsets: Indices  # client i holds indices[offsets[i] : offsets[i + 1]]

    @classmethod
    def cut(cls, indices: Indices, sizes: Indices) -> "Holdings":
        return cls(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Indices:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[Indices]:
        return (self[client] for client in range(len(self)))

    def sizes(self) -> Indices:
        return np.diff(self.offsets)

    def first(self, counts: Indices) -> "Holdings":
        """Each client's first so many samples."""
        return self._taken(self.offsets[:-1], counts)

    def chosen(self, clients: Indices) -> "Holdings":
        """The holdings of these clients, in this order."""
        return self._taken(self.offsets[:-1][clients], self.sizes()[clients])

    def joined(self, number: int) -> "Holdings":
        """Each `number` holdings in a row as one client's."""
        return Holdings(self.indices, self.offsets[::number])

    def shuffled(self, rng: np.random.Generator) -> "Holdings":
        """Each client's samples in a random order."""
        indices = self.indices.copy()
        for start, end in pairwise(self.offsets.tolist()):
            rng.shuffle(indices[start:end])
        return Holdings(indices, self.offsets)

    def _taken(self, starts: Indices, sizes: Indices) -> "Holdings":
        taken = Holdings.cut(self.indices, sizes)
        places = np.repeat(starts - taken.offsets[:-1], sizes)
        places += np.arange(taken.offsets[-1])
        return Holdings(self.indices[places], taken.offsets)


def pathological(
    labels: Indices, clients: int, labels_per_client: int, distinct: bool, rng: np.random.Generator
) -> Holdings:
    """Each class cut into shards of equal size, `labels_per_client` shards a client; distinct: of different classes."""
    classes = np.unique(labels)
    if distinct and labels_per_client > len(classes):
        raise DataError(
            f"clients cannot have {labels_per_client} distinct labels: there are {len(classes)} classes; "
            "lower labels_per_client"
        )
    counts = _even_counts(clients * labels_per_client, len(classes), "classes", rng)
    shards = _shards([np.flatnonzero(labels == label) for label in classes], counts, rng)
    if distinct:
        dealt = _distinct_classes(counts, clients, labels_per_client, rng).ravel()
    else:
        dealt = rng.permutation(np.repeat(np.arange(len(classes)), counts))
    # A class's last shard is dealt first: where each class comes up in the deal, in order, its shards from the last on.
    chosen = np.empty(len(dealt), np.int64)
    chosen[np.argsort(dealt, kind="stable")] = np.concatenate(
        [np.arange(end - 1, end - count - 1, -1) for end, count in zip(np.cumsum(counts), counts, strict=True)]
    )
    return shards.chosen(chosen).joined(labels_per_client)


def superclass(groups: Indices, clients: int, rng: np.random.Generator) -> Holdings:
    """Each group's samples shuffled and cut into pieces of equal size, one piece a client."""
    values = np.unique(groups)
    counts = _even_counts(clients, len(values), "superclasses", rng)
    return _shards([np.flatnonzero(groups == value) for value in values], counts, rng)


def by_client(
    groups: Indices,
    clients: int,
    minimum_samples: int,
    rng: np.random.Generator,
    among: NDArray[np.bool_] | None = None,
) -> tuple[Holdings, Indices]:
    """What clients hold that the data name, so many drawn at random from those with enough samples; and their numbers.

    `among` says by number which may be drawn.
    """
    sizes = np.bincount(groups) if among is None else np.bincount(groups, minlength=len(among))
    enough = sizes >= max(minimum_samples, 1)
    eligible = np.flatnonzero(enough if among is None else enough & among)
    if len(eligible) < clients:
        raise DataError(
            f"{clients} clients with at least {minimum_samples} samples are wanted, and there are {len(eligible)} "
            f"(of {np.count_nonzero(sizes)}); lower clients or minimum_samples, or get more clients"
        )
    held = Holdings.cut(np.argsort(groups, kind="stable"), sizes)
    drawn = rng.choice(eligible, clients, replace=False)
    return held.chosen(drawn), drawn


def shard(labels: Indices, clients: int, shards_per_client: int, rng: np.random.Generator) -> Holdings:
    """All samples, shuffled and sorted by label, cut into shards of equal size; so many at random for each client.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
    """
    order, count = rng.permutation(len(labels)), clients * shards_per_client
    if count > len(labels):
        raise DataError(f"{count} shards are more than the {len(labels)} samples; lower clients or shards_per_client")
    order = order[np.argsort(labels[order], kind="stable")]
    sizes = len(labels) // count + (np.arange(count) < len(labels) % count)
    return Holdings.cut(order, sizes).chosen(rng.permutation(count)).joined(shards_per_client)


def dirichlet(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Holdings:
    """Each class dealt out to all clients in proportions drawn from Dirichlet(alpha); clients may end up with none."""
    dealt, sizes = [], []
    for label in np.unique(labels):
        dealt.append(rng.permutation(np.flatnonzero(labels == label)))
        proportions = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(proportions)[:-1] * len(dealt[-1])).astype(np.int64)
        sizes.append(np.diff(cuts, prepend=0, append=len(dealt[-1])))
    if not dealt:
        return Holdings.cut(np.empty(0, np.int64), np.zeros(clients, np.int64))
    pieces = Holdings.cut(np.concatenate(dealt), np.concatenate(sizes))
    by_client = np.arange(len(pieces)).reshape(len(dealt), clients).T
    return pieces.chosen(by_client.ravel()).joined(len(dealt))


def iid(n: int, clients: int, rng: np.random.Generator) -> Holdings:
    """All samples shuffled and cut into pieces of equal size."""
    return _shards([np.arange(n)], [clients], rng)


def _shards(groups: Sequence[Indices], counts: Sequence[int] | Indices, rng: np.random.Generator) -> Holdings:
    """Each group's positions shuffled and cut into so many pieces, the first ones larger by one where it must be."""
    shuffled = [rng.permutation(group) for group in groups]
    sizes = [
        len(group) // count + (np.arange(count) < len(group) % count)
        for group, count in zip(groups, counts, strict=True)
    ]
    return Holdings.cut(np.concatenate(shuffled), np.concatenate(sizes))


def _even_counts(total: int, parts: int, what: str, rng: np.random.Generator) -> Indices:
    """`total` as a sum of `parts` numbers that differ by one at most; which ones are larger is drawn."""
    if total < parts:
        raise DataError(f"{total} shards do not cover {parts} {what}: some samples would be lost; take more clients")
    counts = np.full(parts, total // parts)
    counts[rng.permutation(parts)[: total % parts]] += 1
    return counts


def _distinct_classes(counts: Indices, clients: int, size: int, rng: np.random.Generator) -> Indices:
    """For each client `size` different classes, class c being dealt counts[c] times.

    Each client takes the classes with the most shards left, ties broken at random. This never gets stuck: no class has
    more shards left than there are clients to come, and the classes at that limit, at most `size`, are always taken.
    """
    left = counts.copy()
    holdings = np.empty((clients, size), np.int64)
    for holding in holdings:
        holding[:] = np.lexsort((rng.random(len(left)), -left))[:size]
        left[holding] -= 1
    return holdings
