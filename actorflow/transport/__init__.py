"""Move tensors and messages between ranks; data planes implement ``actorflow.transport.messages.DataPlane``."""
