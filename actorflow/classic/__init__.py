"""Job functions of the first generation of OneFlow's API, which make their own variables and optimizers."""
