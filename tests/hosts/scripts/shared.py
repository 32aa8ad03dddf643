"""Pass a large tensor between two ranks of one host; the master says through what, and how many bytes."""

import torch

import actorflow as flow
from actorflow_compiler.plan.plan import Send


@flow.global_function(type="predict")
def job(x):
    with flow.scope.placement("cpu", [0]):
        x = x + 1
    with flow.scope.placement("cpu", [1]):
        return (x + 1).sum()


x = torch.zeros(1 << 20)
assert float(job(x)) == 2 * x.numel()
sends = [a.comm.plane for a in job.plan.actors if isinstance(a.comm, Send)]
assert set(sends) == {"shared"}, sends
if flow.env.is_master():
    print("shared", x.numel() * x.element_size())
