"""The messages that cross the wire, generated from plan.proto and runtime.proto (``make protos``)."""
