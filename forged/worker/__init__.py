"""What lives in the training process: the worker, and how workers speak to each other."""

from __future__ import annotations

from forged.elastic.model import WorldOver

__all__ = ["WorldOver"]
