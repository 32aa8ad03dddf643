"""What ranks recorded of themselves enters; traces on one clock, and what they say of a run, leave."""
