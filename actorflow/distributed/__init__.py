"""PyTorch's collectives under their own names, over all ranks of the run; ``distributed.launch`` starts a run.

``flow.distributed.all_reduce(tensor)``: the signatures are those of ``torch.distributed``, and the
ranks meet at the first call without an ``init_process_group``; a script that calls it may.
"""

from __future__ import annotations

from torch.distributed import Backend as Backend
from torch.distributed import P2POp as P2POp
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed import destroy_process_group as destroy_process_group
from torch.distributed import get_process_group_ranks as get_process_group_ranks
from torch.distributed import init_process_group as init_process_group
from torch.distributed import is_available as is_available
from torch.distributed import is_initialized as is_initialized
from torch.distributed import is_nccl_available as is_nccl_available

from actorflow.distributed.collectives import all_gather as all_gather
from actorflow.distributed.collectives import all_gather_into_tensor as all_gather_into_tensor
from actorflow.distributed.collectives import all_gather_object as all_gather_object
from actorflow.distributed.collectives import all_reduce as all_reduce
from actorflow.distributed.collectives import all_to_all as all_to_all
from actorflow.distributed.collectives import all_to_all_single as all_to_all_single
from actorflow.distributed.collectives import barrier as barrier
from actorflow.distributed.collectives import batch_isend_irecv as batch_isend_irecv
from actorflow.distributed.collectives import broadcast as broadcast
from actorflow.distributed.collectives import broadcast_object_list as broadcast_object_list
from actorflow.distributed.collectives import gather as gather
from actorflow.distributed.collectives import gather_object as gather_object
from actorflow.distributed.collectives import get_backend as get_backend
from actorflow.distributed.collectives import get_rank as get_rank
from actorflow.distributed.collectives import get_world_size as get_world_size
from actorflow.distributed.collectives import irecv as irecv
from actorflow.distributed.collectives import isend as isend
from actorflow.distributed.collectives import new_group as new_group
from actorflow.distributed.collectives import recv as recv
from actorflow.distributed.collectives import reduce as reduce
from actorflow.distributed.collectives import reduce_scatter as reduce_scatter
from actorflow.distributed.collectives import reduce_scatter_tensor as reduce_scatter_tensor
from actorflow.distributed.collectives import scatter as scatter
from actorflow.distributed.collectives import scatter_object_list as scatter_object_list
from actorflow.distributed.collectives import send as send
from actorflow.distributed.group import default_group as default_group
from actorflow.support.nearest_names import answer_with_nearest as _answer_with_nearest

_answer_with_nearest(__name__)
