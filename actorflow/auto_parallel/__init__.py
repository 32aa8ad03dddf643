"""Choose the whole plan of a step: mesh, pipeline stages, ZeRO and micro-batches, by forecasts of what is possible."""
