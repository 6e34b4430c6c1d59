"""What every test run shares: hypothesis profiles, and leaving an engine's test files unread where they are deselected.

Knows nothing of routeplane. The profile is chosen by ``--hypothesis-profile`` or, where that is absent, by the
variable ``HYPOTHESIS_PROFILE``; the library itself reads no environment.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# No profile has a deadline, and none complains of slow data: the speed of a shared machine is no property of the code.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

#: while writing code: fresh examples every time, failures remembered
settings.register_profile("dev", _UNTIMED, max_examples=50)
#: `make test`: the same examples every time, so that a change is judged by what it changes
settings.register_profile("ci", _UNTIMED, max_examples=100, derandomize=True, database=None, print_blob=True)
#: `make trust`
settings.register_profile("trust", _UNTIMED, max_examples=3_000, print_blob=True)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_ENGINE_FILE = re.compile(r"^pytestmark = .*\bmark\.vllm\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files marked ``vllm`` as a whole unread where ``-m`` deselects them.

    Importing the engine takes seconds and a gigabyte in each worker, and fails where it is not installed.
    """
    if "not vllm" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return True if _ENGINE_FILE.search(collection_path.read_text(encoding="utf-8")) else None
