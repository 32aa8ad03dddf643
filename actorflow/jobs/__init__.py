"""``flow.global_function``: jobs."""
