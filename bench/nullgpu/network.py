"""Checks tools/plan.py: compares the bytes that a rank sends in FSDP2's collectives with the planned bytes.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.network [--size 7b] [flags of trainer.py]

NULLGPU is the folder of a stub CUDA driver (see bench/nullgpu/trainer.py). Prints a JSON line per phase and
collective. The fields `counted` and `planned` are [GiB to ranks of the same node, GiB to other nodes]. Raises
AssertionError if the two differ by more than 5 % of the plan plus 0.01 GiB.
"""

import torch

import dist
from bench.common import say
from bench.nullgpu import trainer
from bench.traffic import SENDS, count
from guard.messages import GIB
from tools import plan


def planned(name: str, args, case: plan.Case) -> dict[str, list[tuple[int, plan.Sent]]]:
    """Returns the planned bytes of a phase: collective -> pairs (number of times, bytes each time).

    name: "sync", "policy" or "critic" (the phase)"""
    if name == "sync":
        return {"gather": [(1, plan.traffic(case, "policy")["forward"])]}
    sends = plan.traffic(case, name)
    critic = name == "critic"
    updates = args.updates if critic else 1
    packs = args.packs * updates
    return {"gather": [(packs * (1 + critic), sends["forward"]), (packs, sends["backward"])],
            "reduce": [(packs, sends["reduce"])], "all-reduce": [(updates, sends["all-reduce"])]}


class Phases(trainer.Phases):
    def end(self, name: str) -> None:
        args, cfg = trainer.parse()
        case = trainer.case_of(args, cfg, dist.World(0, args.world, torch.device("cuda", 0), torch.bfloat16))
        model = name.partition("[")[0]
        collectives = planned(model, args, case) if model in ("sync", *case.models) else {}
        for collective, parts in collectives.items():
            counted = [SENDS.pop((collective, way), 0) / GIB for way in ("within", "between")]
            by_plan = [sum(times * sent[i] for times, sent in parts) / GIB for i in (0, 1)]
            say({"bench": "nullgpu-network", "shards": case.shards, "phase": name, "collective": collective,
                 "counted": counted, "planned": by_plan})
            assert all(abs(a - b) <= 0.05 * b + 0.01 for a, b in zip(counted, by_plan, strict=True)), name
        super().end(name)


if __name__ == "__main__":
    trainer.Phases = Phases
    count()
    trainer.main()
