"""Functions that compute the bodies of a plan: op by op, compiled by inductor, or replayed as CUDA graphs."""
