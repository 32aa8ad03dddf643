"""Bodies of a plan enter; functions that compute them leave, in the way that the plan asks for."""
