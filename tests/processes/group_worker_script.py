"""A training script whose worker is one process of a replica group, with a part of the state by its group rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from forged.elastic.config import ElasticTrainingConfig
from forged.worker.blocking import join
from tests.processes.worker_script import FOREVER, JOB, STOP_FILE, agree_on_end, report, steps
from tests.worker.trainers import advance


def main() -> None:
    """Run a worker. The words are endpoint, name, directory and options, with the place in a group among them."""
    endpoint, name, directory, options = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    place = {key: options[key] for key in ("group", "group_rank", "group_size")}
    part = 1 + options["group_rank"]
    state = {"part": np.full(1, part, np.int64), "ends_at": np.full(1, FOREVER, np.int64)}
    config = ElasticTrainingConfig(**options["config"])
    chain = [part]
    with join(endpoint, job=JOB, state=state, worker_id=name, config=config, **place) as worker:
        assert (worker.group, worker.group_rank, worker.group_size) == tuple(place.values())
        for step in steps(worker):
            while len(chain) <= step:
                chain.append(advance(chain[-1], len(chain) - 1))
            assert state["part"][0] == chain[step], "the state is not that of this group rank"
            assert worker.rank == worker.replica_rank * worker.group_size + worker.group_rank
            place_in_world = {"generation": worker.generation, "rank": worker.rank, "size": worker.world_size}
            with step:
                (ending,) = worker.all_reduce(np.array([(directory / STOP_FILE).exists()], np.int64))
                step.commit()
                state["part"][0] = advance(int(state["part"][0]), int(step))
                agree_on_end(state, step, ending)
            if not step.aborted:
                report(step=int(step), **place_in_world)
        report(finished=worker.step)


if __name__ == "__main__":
    main()
