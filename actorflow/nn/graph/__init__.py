"""``flow.nn.Graph``: programs of OneFlow's second generation, as jobs."""

from __future__ import annotations

from actorflow.nn.graph.graph_config import GraphConfig
from actorflow.nn.graph.graph_module import GraphModule
from actorflow.nn.graph.static_graph import StaticGraph as Graph

__all__ = ["Graph", "GraphConfig", "GraphModule"]
