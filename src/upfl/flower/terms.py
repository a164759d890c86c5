"""What a run is, as its server tells the nodes, and what a node's owner says about the node.

A training node holds client number `client` of the federation: with `data`, its own labelled samples; without, the
client's part of the run's named data set, for trials. A node without a number is a newcomer: with `data`, unlabelled
samples of its own; with `newcomer`, the part of a new client of the named data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from upfl import data
from upfl.config import Config, read_toml
from upfl.data.federation import Clients, Federation
from upfl.data.files import load_labelled
from upfl.data.partition import Indices
from upfl.data.sources import Source
from upfl.errors import ConfigError
from upfl.randomness import seed_of
from upfl.suggest import unknown


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Any:
        """From a table with dashes in its names; an empty string counts as not given."""
        given = {key.replace("-", "_"): value for key, value in values.items() if value != ""}
        known = [name.replace("_", "-") for name in cls.model_fields]
        for key in values:
            if key not in known:
                raise ConfigError(f"{where}: {unknown('key', key, known)}")
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])).replace("_", "-")
            raise ConfigError(f"{where}: {name}: {first['msg']} (given: {first['input']!r})") from None


class Samples(Table):
    """What every client's samples look like: the images' form and scale, the classes, how many clients there are."""

    name: str
    shape: tuple[int, int, int] = Field(description="channels, height, width")
    classes: tuple[str, ...] = Field(min_length=2)
    scale: float = Field(255.0, gt=0, description="the whole number of full intensity in arrays")
    mean: tuple[float, ...] = Field(description="of each channel, where full intensity is 1")
    std: tuple[float, ...]
    clients: int = Field(ge=1, description="training clients that exist, whether or not they take part")

    @classmethod
    def read(cls, path: Path) -> Samples:
        samples: Samples = cls.of(read_toml(path), str(path))
        if not len(samples.mean) == len(samples.std) == samples.shape[0] or min(samples.std) <= 0:
            raise ConfigError(
                f"{path}: mean and std need a number for each of {samples.shape[0]} channel(s), std above 0"
            )
        return samples

    @classmethod
    def like(cls, source: Source, clients: int) -> Samples:
        channels, height, width = source.images.shape[1:]
        return cls(
            name=source.name,
            shape=(channels, height, width),
            classes=source.class_names,
            scale=source.scale,
            mean=source.mean,
            std=source.std,
            clients=clients,
        )

    def source(self, images: np.ndarray, labels: Indices, scale: float | None = None) -> Source:
        return Source(
            self.name, images, labels, self.classes, len(labels), None, scale or self.scale, self.mean, self.std
        )


class Terms(Table):
    """A run, as nodes hear of it."""

    run: str = Field(
        pattern="^[0-9a-f]{32}$", description="no other run has this name; a node keeps its memory under it"
    )
    config: Config
    samples: Samples


class Node(Table):
    """What `--node-config` says."""

    client: int | None = Field(None, ge=0, description="the number of the training client that this node is")
    newcomer: int | None = Field(None, ge=0, description="for trials: the new client of the named data set that it is")
    data: Path | None = Field(None, description="its own samples; labelled if it trains")
    state: Path | None = Field(None, description="a folder for what it must remember beyond a Flower run")
    out: Path | None = Field(None, description="a folder for what a newcomer makes of the bundle")
    share: Literal["counts", "estimates"] = Field("counts", description="what a newcomer sends back")
    device: str = "cpu"


def node_federation(terms: Terms, node: Node) -> Federation:
    """The federation as a training node sees it: its own client's samples, with nothing of the others."""
    samples = terms.samples
    if node.client is None or node.client >= samples.clients:
        raise ConfigError(f"node-config: client is {node.client}; a training node is one of 0 to {samples.clients - 1}")
    if node.data is None:
        federation = named_federation(terms.config)
        if Samples.like(federation.source, len(federation.training)) != samples:
            raise ConfigError(
                f"{terms.config.dataset} is not the data set that the run describes; give data in node-config"
            )
        return federation
    own = load_labelled(node.data, samples.shape, samples.classes, samples.scale)
    assert own.labels is not None
    count, partition = len(own), terms.config.partition
    order = np.random.default_rng(seed_of(terms.config.partition_seed, "partition", "node", node.client))
    validation = min(max(round(partition.validation * count), int(partition.validation > 0)), count - 1)
    sizes, train_counts = np.zeros((2, samples.clients), np.int64)
    sizes[node.client], train_counts[node.client] = count, count - validation
    clients = Clients(
        order.permutation(count), np.concatenate([[0], np.cumsum(sizes)]), train_counts, np.zeros(samples.clients)
    )
    return Federation(samples.source(own.images, own.labels, own.scale), clients, nobody(), np.empty(0, np.int64), ())


def named_federation(config: Config) -> Federation:
    return data.build_federation(data.load(config.dataset), config.partition, config.partition_seed)


def unseen_federation(samples: Samples) -> Federation:
    """The federation as its server knows it: no sample. A blank image stands for each client's, for the form."""
    ones = np.ones(samples.clients, np.int64)
    twice = np.zeros(2 * samples.clients, np.int64)  # once to train, once to validate
    clients = Clients(twice, 2 * np.arange(samples.clients + 1), ones, np.zeros(samples.clients))
    blank = samples.source(np.zeros((1, *samples.shape), np.uint8), np.zeros(1, np.int64))
    return Federation(blank, clients, nobody(), np.empty(0, np.int64), ())


def nobody() -> Clients:
    none = np.empty(0, np.int64)
    return Clients(none, np.zeros(1, np.int64), none, none.astype(np.float64))


def without_training_clients(federation: Federation) -> Federation:
    return replace(federation, training=nobody())
