"""The variables of plans between calls: state, gradients, what optimizers keep, views, exchanged tensors."""
