"""Ways to move tensors between ranks; each implements ``actorflow.transport.messages.DataPlane``."""
