"""One model over several ranks: memories split by channels, sequences split by time.

The layers keep their arithmetic and the names of their parameters. This package adds the collectives between ranks.
"""

from sdm.parallel.channels import ChannelShard, from_full_, shard_dim, shard_size, split_channels, to_full
from sdm.parallel.collectives import Traffic, count_traffic
from sdm.parallel.context import TimeSlice, split_time

__all__ = [
    "ChannelShard",
    "TimeSlice",
    "Traffic",
    "count_traffic",
    "from_full_",
    "shard_dim",
    "shard_size",
    "split_channels",
    "split_time",
    "to_full",
]
