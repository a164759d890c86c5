"""Every training on every real data set that is on this machine: two workers, stopped and resumed, to the same bits.

`make test-all` with `$UPFL_DATA` set (CONTRIBUTING.md); a data set that is not there is skipped, and said so.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest

import upfl
from tests.observers import Interrupting
from tests.plugin_methods import lines, timeless
from upfl.data import build_federation, default_partition, load
from upfl.data.catalog import CATALOG
from upfl.data.sources import locate
from upfl.methods import TRAININGS

pytestmark = pytest.mark.full


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("dataset", CATALOG)
def test_two_workers_and_a_resume_change_no_bit(training: str, dataset: str, tmp_path: Path) -> None:
    if locate(dataset) is None:
        pytest.skip(f"{dataset} is not on this machine: `upfl data fetch {dataset}`, or set $UPFL_DATA")
    head = ["rank=4"] if training == "odpfl-hn" else []  # the full head wants one worker and gigabytes
    config = upfl.configure(training, dataset, profile="smoke", rounds=2, settings=["iterations=2", *head])

    whole = upfl.train(config, tmp_path / "whole", workers=1)
    with pytest.raises(KeyboardInterrupt):
        upfl.train(config, tmp_path / "stopped", workers=1, observer=Interrupting(1))
    resumed = upfl.resume(tmp_path / "stopped", workers=2)

    assert [row["row"] for row in whole.result["rows"]] == [row["row"] for row in resumed.result["rows"]]
    assert len(lines(whole.path)) == 2
    assert timeless(lines(whole.path)) == timeless(lines(resumed.path))
    assert not any(metrics["left_out"] for metrics in whole.metrics)


WRITERS = {  # digests of who holds what in FEMNIST, worked out at e1a5083, where the partition was called `writer`
    0: "b10e26c0d8784bf39a5baf0a2ff6c910af0b304a840b690190040825a6df66e3",
    1: "e764374eca0ee4388114e1a3d16985e1b3271ba7785f63c7064d35295ec653d9",
}


@pytest.mark.parametrize("seed", WRITERS)
def test_natural_gives_femnist_the_bits_that_writer_gave(seed: int) -> None:
    if locate("femnist") is None:
        pytest.skip("femnist is not on this machine: set $UPFL_DATA")
    federation, digest = build_federation(load("femnist"), default_partition("femnist"), seed), hashlib.sha256()
    for _, clients in federation.roles():
        for array in (clients.indices, clients.offsets, clients.train_counts):
            digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    assert digest.hexdigest() == WRITERS[seed]
