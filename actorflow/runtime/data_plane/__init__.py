"""Ways to move tensors between ranks; each implements ``actorflow.runtime.messages.DataPlane``."""
