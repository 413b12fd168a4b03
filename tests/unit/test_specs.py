"""What an executor is made from, and that the class it names takes it."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from llamarl.cluster.executor import resolve
from llamarl.controller.specs import Spec


@pytest.mark.parametrize("spec", get_args(Spec), ids=lambda spec: spec.__name__)
def test_each_spec_names_the_executor_that_takes_it(spec: type) -> None:
    executor = resolve(spec.executor)  # type: ignore[attr-defined]
    assert get_type_hints(executor.__init__)["spec"] is spec


def test_the_wiring_loads_no_torch() -> None:
    code = "import sys, llamarl.controller.wiring; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
