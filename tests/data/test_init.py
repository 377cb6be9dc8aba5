"""What importing `forged` loads."""

from __future__ import annotations

import subprocess
import sys


def test_import_forged_does_not_load_numpy_or_the_data_package() -> None:
    program = (
        "import forged, forged.cli.forgectl.main, sys; sys.exit('forged.data' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
