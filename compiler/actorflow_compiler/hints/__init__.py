"""Users' hints for a step: layouts, placements, ZeRO, micro-batches; and the marker ops that carry them."""
