"""A module of one's own over Flower's nodes: the engine's bits, and a node that lacks it says so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Message

from tests import plugin_models as plugin_models
from tests.helpers.flower import assert_same_run, federated, nodes
from tests.in_process_grid import InProcessGrid
from upfl import api
from upfl.contract.personalizer import LEAST_CLIENTS
from upfl.errors import UpflError
from upfl.models import registry
from upfl.testing.parts import small

pytestmark = pytest.mark.bits
NODES = dict(list(nodes().items())[: LEAST_CLIENTS[0]])  # as many as `small` has training clients


@pytest.mark.parametrize(
    ("method", "model", "score"),
    [("fedtta", "own-dropout", ()), ("tent", "own-batchnorm", ("refit",)), ("scaffold", "resnet8", ())],
)
def test_a_module_trains_over_nodes_to_the_engines_bits(
    method: str, model: str, score: tuple[str, ...], tmp_path: Path
) -> None:
    """Running statistics are averaged, dropout is drawn alike, and what is fitted is fitted alike."""
    config = small(method, model, score=score)
    api.train(config, tmp_path / "engine", workers=1)
    federated(config, tmp_path / "flower", InProcessGrid(NODES))
    assert_same_run(tmp_path / "flower", tmp_path / "engine")


class Lacking(InProcessGrid):
    """Nodes whose processes have not registered a model."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(registry._ENTRIES, "own-batchnorm")
            return super().push_messages(messages)


def test_a_node_without_the_model_says_what_it_lacks_and_the_run_does_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UpflError) as refused:
        federated(small("fedavg", "own-batchnorm"), tmp_path / "run", Lacking(NODES))
    for words in (caplog.text, str(refused.value)):
        assert "the run does not fit this node's upfl" in words
        assert "in the node's UPFL_PLUGINS): model.name: unknown model 'own-batchnorm'" in words
