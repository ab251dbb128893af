"""One model over several ranks: the memory split by channels, sequences split by time.

Layers keep their classes' arithmetic and their parameters' names; what is here adds the few exchanges between ranks.
"""

from sdm.parallel.channels import Cut, split_channels
from sdm.parallel.collectives import Traffic, counted
from sdm.parallel.context import TimeSlice, split_time
from sdm.parallel.degrees import unsupported_reason
from sdm.parallel.shares import share_dim, share_size
from sdm.parallel.wholes import share_of_whole, take_share_

__all__ = [
    "Cut",
    "TimeSlice",
    "Traffic",
    "counted",
    "share_dim",
    "share_of_whole",
    "share_size",
    "split_channels",
    "split_time",
    "take_share_",
    "unsupported_reason",
]
