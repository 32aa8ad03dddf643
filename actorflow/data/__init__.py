"""``flow.data``: data sources, of which each rank reads only the rows that it needs."""

from actorflow.data.data_source import DataSource
from actorflow.data.packed import PackedRows, packed, segment_mask
from actorflow.data.shards import sharded
from actorflow.data.sources import loader

__all__ = ["DataSource", "PackedRows", "loader", "packed", "segment_mask", "sharded"]
