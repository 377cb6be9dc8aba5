"""The mutant of each row that the seed map shows."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map import Row, keys, rows
from tests.seed_map_mutants import (
    checkpoint_catalog,
    data_redistributor,
    distributed_checkpoint,
    elastic_config,
    elastic_worker,
    gpu_memory,
    model_registry,
)
from tests.seed_map_mutants.mutation import Mutation

CATALOG: Mapping[str, Mapping[str, Mutation | str]] = {
    "elastic_config_models.md": elastic_config.MUTANTS,
    "elastic_worker_core.md": elastic_worker.MUTANTS,
    "data_redistributor.md": data_redistributor.MUTANTS,
    "distributed_checkpoint_api.md": distributed_checkpoint.MUTANTS,
    "tensorforge_greenfield_tasks.md": {**model_registry.MUTANTS, **gpu_memory.MUTANTS, **checkpoint_catalog.MUTANTS},
}
"""For each seed and key of a row, how its code is broken, or why no edit of the code could break it."""


def shown_rows() -> list[Row]:
    """The rows that name a test."""
    return [row for row in rows() if row.state == "shown"]


def mutants() -> list[tuple[Row, Mutation]]:
    """The rows whose code can be broken, each with its mutation."""
    found = ((row, CATALOG[row.seed].get(keys()[row])) for row in shown_rows())
    return [(row, mutation) for row, mutation in found if mutation is not None and not isinstance(mutation, str)]
