"""The placing pass: a placement and a pipeline stage for each op."""
