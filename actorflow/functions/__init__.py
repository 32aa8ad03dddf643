"""OneFlow's first-generation functions over torch's, beside their layers and `flow.nn`."""
