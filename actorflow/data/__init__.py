"""``flow.data``: data sources, of which each rank reads only the rows that it needs."""

from actorflow.data.data_source import DataSource
from actorflow.data.packed import PackedRows, packed, segment_mask
from actorflow.data.shards import sharded
from actorflow.data.sources import loader
from actorflow.support.nearest_names import answer_with_nearest

__all__ = ["DataSource", "PackedRows", "loader", "packed", "segment_mask", "sharded"]

answer_with_nearest(__name__, "docs/data.md")
