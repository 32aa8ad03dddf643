"""What users say about a step: layouts, placements, ZeRO, micro-batches; and the ops that carry it."""
