"""``flow.nn.Graph``: programs of OneFlow's second generation, as jobs."""

from __future__ import annotations

from actorflow.nn.graph.graph_config import GraphConfig
from actorflow.nn.graph.graph_module import GraphModule
from actorflow.nn.graph.static_graph import StaticGraph as Graph
from actorflow.support.nearest_names import answer_with_nearest

__all__ = ["Graph", "GraphConfig", "GraphModule"]

answer_with_nearest(__name__)
