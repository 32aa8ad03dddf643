"""The exceptions that users meet.  Each says where, what was found, what was expected, and what to do."""


class ActorflowError(Exception):
    """Base of every error that actorflow raises on purpose."""


class CaptureError(ActorflowError):
    """The step could not be captured as a graph; the message shows the user's line."""


class LayoutError(ActorflowError):
    """A placement or an SBP does not fit the tensor or the cluster it was given for."""

    needed: float = 0.0  # bytes that a device needs at least, where a memory budget is too small for that


class NotGlobal(LayoutError, AttributeError):
    """An attribute that only global tensors have was read from a plain tensor."""


class GlobalInCollective(LayoutError):
    """A collective of ``torch.distributed`` was given a global tensor."""

    def __init__(self, collective: str) -> None:
        super().__init__(
            f"the collective {collective} was given a global tensor; a plain one was expected, of which each rank has "
            "its own. A global tensor is moved by its layout: x.to_global(sbp=flow.sbp.broadcast) gives every rank the "
            "whole, and x.to_local() is this rank's part"
        )


class SignatureError(ActorflowError):
    """A signature that was registered for an op is malformed, does not fit its schema, or is wrong."""


class PlanError(ActorflowError):
    """A plan is not legal, or is refused because it cannot be proven to run."""


class DeadlockError(PlanError):
    """A plan would wait for ever; the message prints the cycle, actor by actor."""


class HardwareError(ActorflowError):
    """A hardware file cannot be read, or holds a value without meaning; the message names the file and the key."""


class TraceError(ActorflowError):
    """A folder of traces cannot be read or written, or was written by another version; the message names the file."""


class ShowError(ActorflowError):
    """A picture of a plan cannot be made: unknown format, a path that cannot be written, or a missing library."""


class CallError(ActorflowError):
    """A job was called differently on different ranks, or with arguments that do not fit."""


class DataError(ActorflowError):
    """A data source cannot give what was asked of it: a sample that raises, rows of other shapes, a lost worker."""


class StateError(ActorflowError):
    """Parameters or optimizer state that a plan owns were used in a way that it does not support."""


class ClusterError(ActorflowError):
    """The ranks could not come together, or one of them was lost."""


class ActorError(ActorflowError):
    """An actor failed while it ran; the message names rank, actor and op, and ``__cause__`` is the original error."""
