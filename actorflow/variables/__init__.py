"""The variables of plans between calls: their values, gradients, optimizer state, views, and rebinding."""
