"""Compile a training step: capture it, lay it out over the devices, and cut it into a plan of actors."""
