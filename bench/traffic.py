"""Runs train.py and prints at the end how many bytes a rank sends in FSDP2's collectives.

    torchrun --nproc-per-node 8 -m bench.traffic PRESET [flags of train.py]

Rank 0 prints one JSON line: for each collective, the GiB that a rank sends within its node and to other
nodes. The network is not measured: tools.plan.sent computes the bytes of each call from the tensor's size.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as td

import configs
from bench.common import say
from guard.messages import GIB
from tools import plan

SENDS: Counter = Counter()  # (collective, "within" or "between" nodes) -> bytes
# function of torch.distributed -> (name in SENDS, factor of the tensor's bytes). The factor is 2 for an
# all-reduce, because it sends as much as a reduce-scatter and an all-gather together.
COLLECTIVES = {"all_gather_single": ("gather", 1), "reduce_scatter_single": ("reduce", 1),
               "all_reduce": ("all-reduce", 2)}


def count() -> None:
    """Patches the functions of COLLECTIVES to count bytes in SENDS. All-reduces over all ranks are not
    counted: most are dist.all_sum of a few numbers. With --shard_ranks 1, this leaves out FSDP2's, too."""
    def patch(function: str, name: str, times: int) -> None:
        real = getattr(td, function)

        def call(*args, **kwargs):
            ranks = td.get_process_group_ranks(kwargs.get("group") or td.group.WORLD)
            size = max(x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            nodes = len({rank // configs.NODE for rank in ranks})
            others = name != "all-reduce" or len(ranks) < td.get_world_size()
            for way, n in plan.sent(times * size * others, len(ranks), nodes)._asdict().items():
                SENDS[name, way] += n
            return real(*args, **kwargs)

        setattr(td, function, call)

    for function, (name, times) in COLLECTIVES.items():
        patch(function, name, times)


if __name__ == "__main__":
    import train
    from guard import start as start_of_run

    load_models = start_of_run.load_models

    def start(*args):
        SENDS.clear()  # drops the bytes of the network check at the start
        return load_models(*args)

    start_of_run.load_models = start
    count()
    train.main(configs.parse())
    if td.get_rank() == 0:
        say({f"{name}, {way}": round(n / GIB, 4) for (name, way), n in sorted(SENDS.items())})
