"""What clients hold: sources, their partition among clients, and the federation that comes of it."""

from upfl.data.federation import Clients, Federation, build_federation, class_counts
from upfl.data.partition import Partition, default_partition
from upfl.data.source import Source
from upfl.data.sources import NAMES, load

__all__ = [
    "NAMES",
    "Clients",
    "Federation",
    "Partition",
    "Source",
    "build_federation",
    "class_counts",
    "default_partition",
    "load",
]
