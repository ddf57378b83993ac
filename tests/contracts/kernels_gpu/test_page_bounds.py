"""Page bounds on a GPU, with the checks of the portable implementation."""

from __future__ import annotations

import pytest

from tests.contracts.test_page_bounds import CASES, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.chunk}-{case.page}-{case.dim}")
def test_bounds_are_those_of_the_pages(case, implementation):
    check(case, implementation)
