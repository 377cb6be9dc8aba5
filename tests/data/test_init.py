"""The public names of `forged.data`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import cached_property
from types import FunctionType, MethodType

from forged import data


def test_every_public_name_says_what_it_is() -> None:
    public = [getattr(data, name) for name in data.__all__]
    told = (FunctionType, MethodType, property, cached_property)
    members = [
        member
        for cls in public
        for name, member in inspect.getmembers(cls, lambda one: isinstance(one, told))
        if name in vars(cls) and not name.startswith("_")
    ]
    assert members
    assert [one for one in (*public, *members) if not inspect.getdoc(one)] == []


def test_who_does_not_plan_does_not_import_it() -> None:
    program = (
        "import forged, forged.cli.forgectl.main, sys; sys.exit('forged.data' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
