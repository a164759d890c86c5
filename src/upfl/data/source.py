"""A data set: all samples of all clients, with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from upfl.data.draft import Digest, Draft
from upfl.data.forms import Form
from upfl.data.own import arrays
from upfl.data.own.options import Options
from upfl.data.own.reading import read


@dataclass(frozen=True)
class Source:
    """All samples of a data set, the canonical training set first. The arrays are read-only."""

    name: str
    x: NDArray[Any]  # [n, *form.shape] as the form keeps them, one copy on the machine for all processes
    labels: NDArray[np.int64]  # -1 where a newcomer's sample has none
    class_names: tuple[str, ...]
    train_count: int  # the samples from here on are the canonical test set
    groups: NDArray[np.int64] | None  # each sample's client (own data, femnist) or superclass (cifar100)
    form: Form
    clients: NDArray[np.bytes_] | None = None  # the names of the clients that `groups` numbers
    newcomers: NDArray[np.bool_] | None = None  # which of these are newcomers, where the data say so
    digest: str = ""  # of the arrays, of one's own data

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        clients: ArrayLike | None = None,
        newcomers: ArrayLike | None = None,
        *,
        tokens: bool = False,
        vocabulary: int | None = None,
        scale: float | None = None,
        name: str | None = None,
    ) -> Source:
        """Of arrays: x with a sample in each row, y with its class, perhaps its client, and whether that is a newcomer.

        x is [n, d] (features, or tokens) or images [n, h, w], [n, h, w, c], [n, c, h, w]: whole numbers up to `scale`
        (255), or floats in [0, 1].
        """
        given = {"x": x, "y": y, "client": clients, "newcomer": newcomers}
        found = {role: np.asarray(values) for role, values in given.items() if values is not None}
        options = Options(tokens="x" if tokens else None, vocabulary=vocabulary, scale=scale)
        return cls.of(arrays.of_arrays(found, "arrays", options), name)

    @classmethod
    def from_folder(
        cls, path: str | Path, *, resize: tuple[int, int] | None = None, name: str | None = None, **options: Any
    ) -> Source:
        """Of a folder of images, client/class/image or class/image, or one that Hugging Face's save_to_disk wrote."""
        return cls.of(read(path, Options(resize=resize, **options)), name)

    @classmethod
    def from_table(
        cls,
        path: str | Path,
        label: str,
        client: str | None = None,
        newcomer: str | None = None,
        features: Sequence[str] = (),
        *,
        name: str | None = None,
        **options: Any,
    ) -> Source:
        """Of a CSV or Parquet file; further options are those of `upfl data add`: image, tokens, text, length, ..."""
        columns = Options(label=label, client=client, newcomer=newcomer, features=tuple(features), **options)
        return cls.of(read(path, columns), name)

    @classmethod
    def of(cls, draft: Draft, name: str | None = None) -> Source:
        """What a reader has found, in memory. Without a name it is called by its content."""
        x = draft.gathered()
        digest = Digest(draft.form, draft.class_names)
        for array in (draft.labels, draft.groups, draft.clients, draft.newcomers, x):
            digest.update(array)
            if array is not None:
                array.flags.writeable = False
        return cls(
            name=name or f"own-{str(digest)[:12]}",
            x=x,
            labels=draft.labels,
            class_names=draft.class_names,
            train_count=len(draft),
            groups=draft.groups,
            form=draft.form,
            clients=draft.clients,
            newcomers=draft.newcomers,
            digest=str(digest),
        )
