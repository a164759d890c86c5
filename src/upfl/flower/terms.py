"""What a run is, as its server tells the nodes, and what a node's owner says about the node.

A training node holds client number `client` of the federation: with `data`, its own labelled samples; without, the
client's part of the run's named data set, for trials. A node without a number is a newcomer: with `data`, unlabelled
samples of its own; with `newcomer`, the part of a new client of the named data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from upfl.bundle.manifest import TaskSection
from upfl.config import Config, configure, listed, read_toml, validated
from upfl.data.federation import Clients, Federation, validation_sizes
from upfl.data.forms import Form, Pixels, Vectors
from upfl.data.given import labelled
from upfl.data.partition import Indices
from upfl.data.source import Source
from upfl.engine.setup import named_federation
from upfl.errors import ConfigError
from upfl.flower.privacy import Privacy
from upfl.methods import training_class
from upfl.randomness import seed_of


class Table(BaseModel):
    """A table of Flower's: names with dashes, and an empty string for what is not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        given = {key.replace("-", "_"): value for key, value in values.items() if value != ""}
        table: Self = validated(cls, given, where)
        return table


class Settings(Table):
    """What `flwr run -c` says: the run's description is the engine's, the rest is about nodes."""

    mode: Literal["train", "personalize"] = "train"
    method: str = "fedtta"
    dataset: str = Field("digits", description="a named data set; with `task`, the one whose hyper-parameters to take")
    profile: str = "paper"
    config: Path | None = Field(None, description="a TOML file of settings, as `upfl train --config` takes it")
    set: str = Field("", description="hyper-parameters, as --set takes them, separated by spaces")
    score: str = Field("", description="further personalizers, separated by commas")
    task: Path | None = Field(None, description="a TOML file that says what nodes' own samples are")
    out: Path | None = Field(None, description="the run folder, on the SuperLink's machine; a run in it is resumed")
    min_nodes: int = Field(2, ge=1, description="fewest training nodes to begin with, and good replies to a round")
    wait: float = Field(600, gt=0, description="seconds to wait for so many nodes")
    timeout: float = Field(600, gt=0, description="seconds for a node's reply")
    largest_rms: float = Field(100, gt=0, description="a node whose values have a larger root mean square is left out")
    clip: float = Field(0, ge=0, description="differential privacy: largest norm of an update; 0 for none")
    noise: float = Field(0, ge=0, description="differential privacy: noise on the sum, in units of clip")
    delta: float = Field(1e-5, gt=0, lt=1)
    secure: bool = Field(False, description="sums of which the link learns nothing but the sum")
    threshold: float = Field(2 / 3, gt=0.5, le=1, description="secure: the share of nodes that must stay to the end")
    bundle: Path | None = Field(None, description="personalize: what newcomers receive, on the SuperLink's machine")

    @model_validator(mode="after")
    def _private_or_not(self) -> Settings:
        if bool(self.clip) != bool(self.noise):
            raise ConfigError("clip and noise belong together: give both, or neither")
        return self

    @property
    def privacy(self) -> Privacy | None:
        return Privacy(clip=self.clip, noise=self.noise, delta=self.delta) if self.clip else None


def describe(settings: Settings) -> Config:
    """The run that the settings describe."""
    return configure(
        settings.method,
        settings.dataset,
        profile=settings.profile,
        file=settings.config,
        settings=["partition.held_out=0", *settings.set.split()],  # every node that is there trains
        score=listed(settings.score),
    )


OF_A_SOURCE = ("samples", "newcomers", "unlabelled", "digest")


class FederationTask(TaskSection):
    """What is to be learned, and how many training clients there are, whether or not they take part."""

    clients: int = Field(ge=1)

    @classmethod
    def read(cls, path: Path) -> FederationTask:
        """A task file, or the `source.toml` of a data set that was added, of which its samples do not count."""
        told = {key: value for key, value in read_toml(path).items() if key not in OF_A_SOURCE}
        task: FederationTask = validated(cls, told, str(path))
        return task

    @classmethod
    def of(cls, source: Source, clients: int) -> FederationTask:
        return cls(name=source.name, classes=source.class_names, input=source.form, clients=clients)

    @property
    def open(self) -> bool:
        """Whether mean and deviation of features are not known yet: sums over nodes will tell (`feature_sums`)."""
        return isinstance(self.input, Vectors) and not self.input.mean

    @property
    def unstandardized(self) -> FederationTask:
        """As it was before anything was known of the nodes' features."""
        if not isinstance(self.input, Vectors):
            return self
        return self.model_copy(update={"input": self.input.model_copy(update={"mean": (), "std": ()})})

    def source(self, x: NDArray[Any], labels: Indices, scale: float) -> Source:
        """Samples of this task as a data set of their own."""
        form: Form = self.input
        if isinstance(form, Pixels):
            form = form.model_copy(update={"scale": scale})
        elif isinstance(form, Vectors) and self.open:
            form = form.unchanged
        return Source(self.name, x, labels, self.classes, len(labels), None, form)


class Terms(BaseModel):
    """A run, as nodes hear of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(
        pattern="^[0-9a-f]{32}$", description="no other run has this name; a node keeps its memory under it"
    )
    config: Config
    task: FederationTask
    privacy: Privacy | None = None
    secure: bool = False

    @classmethod
    def received(cls, text: str) -> Terms:
        """What the server sent; a node may lack what a run needs, such as a model that is registered elsewhere."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(
                "the run does not fit this node's upfl (where a model or method is not known, name the module that "
                f"registers it in the node's UPFL_PLUGINS): {reason}"
            ).public() from error


class Node(Table):
    """What `--node-config` says."""

    client: int | None = Field(None, ge=0, description="the number of the training client that this node is")
    newcomer: int | None = Field(None, ge=0, description="for trials: the new client of the named data set that it is")
    data: Path | None = Field(None, description="its own samples; labelled if it trains")
    state: Path | None = Field(None, description="a folder for what it must remember beyond a Flower run")
    out: Path | None = Field(None, description="a folder for what a newcomer makes of the bundle")
    personalizer: str | None = Field(None, description="of those in the bundle; its default unless told otherwise")
    architecture: str | None = Field(None, description="a newcomer's, where the bundle has models of several sizes")
    share: Literal["counts", "estimates"] = Field("counts", description="what a newcomer sends back")
    device: str = "cpu"
    secure: bool = Field(False, description="whether it takes part in secure sums, and in nothing else")
    key: Path | None = Field(None, description="secure: its private key, the one that it is registered with")
    peers: Path | None = Field(None, description="secure: a file with the registered public keys of all clients")
    least: int = Field(2, ge=2, description="secure: the fewest nodes whose parts a sum may have")

    @property
    def keys(self) -> tuple[ec.EllipticCurvePrivateKey, dict[int, ec.EllipticCurvePublicKey]]:
        """Its own key, and the public keys of all clients by their numbers."""
        if self.key is None or self.peers is None:
            raise ConfigError("node-config: secure needs `key`, this node's private key, and `peers`").public()
        try:
            own = serialization.load_ssh_private_key(self.key.expanduser().read_bytes(), None)
            rows = [line.partition(" ") for line in self.peers.expanduser().read_text().splitlines() if line.strip()]
            peers = {int(client): serialization.load_ssh_public_key(key.encode()) for client, _, key in rows}
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"node-config: key or peers: {error}") from error
        curves = {client: key for client, key in peers.items() if isinstance(key, ec.EllipticCurvePublicKey)}
        if not isinstance(own, ec.EllipticCurvePrivateKey) or len(curves) < len(peers):
            raise ConfigError("node-config: key and peers must be ECDSA keys, as nodes are registered with")
        return own, curves


def node_federation(terms: Terms, node: Node) -> Federation:
    """The federation as a training node sees it: its own client's samples, with nothing of the others."""
    task = terms.task
    if node.client is None or node.client >= task.clients:
        raise ConfigError(
            f"node-config: client is {node.client}; a training node is one of 0 to {task.clients - 1}"
        ).public()
    if node.data is None:
        federation = named_federation(terms.config)
        if FederationTask.of(federation.source, len(federation.training)) != task:
            raise ConfigError(
                f"node-config: the run's task is not {terms.config.dataset} as this node has it; give data"
            ).public()
        return federation
    require_no_public_set(terms.config)
    own = labelled(node.data, task.input, task.classes)
    assert own.labels is not None
    count, partition = len(own), terms.config.partition
    order = np.random.default_rng(seed_of(terms.config.partition_seed, "partition", "node", node.client))
    sizes, train_counts = np.zeros((2, task.clients), np.int64)
    sizes[node.client] = count
    train_counts[node.client] = count - int(validation_sizes(sizes[[node.client]], partition.validation)[0])
    clients = Clients(
        order.permutation(count), np.concatenate([[0], np.cumsum(sizes)]), train_counts, np.zeros(task.clients)
    )
    return Federation(task.source(own.x, own.labels, own.scale), clients, nobody(), np.empty(0, np.int64), ())


def unseen_federation(task: FederationTask) -> Federation:
    """The federation as its server knows it: no sample. A blank image stands for each client's, for the form."""
    ones = np.ones(task.clients, np.int64)
    twice = np.zeros(2 * task.clients, np.int64)  # once to train, once to validate
    clients = Clients(twice, 2 * np.arange(task.clients + 1), ones, np.zeros(task.clients))
    blank = task.source(np.zeros((1, *task.input.shape), task.input.dtype), np.zeros(1, np.int64), _scale(task.input))
    return Federation(blank, clients, nobody(), np.empty(0, np.int64), ())


def _scale(form: Form) -> float:
    return form.scale if isinstance(form, Pixels) else 1.0


def require_no_public_set(config: Config) -> None:
    """Own data come without the public set that clients of different architectures share."""
    if training_class(config.training_name).heterogeneous:
        raise ConfigError(
            f"{config.training_name} needs a public set, which parts of a named data set alone have"
        ).public()


def nobody() -> Clients:
    none = np.empty(0, np.int64)
    return Clients(none, np.zeros(1, np.int64), none, none.astype(np.float64))
