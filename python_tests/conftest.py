from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from layer_calls import Layer

from cake.testing.synthetic import fill_random_prepared

GOLDEN = Path(__file__).resolve().parents[1] / "testdata" / "golden"

Golden = Callable[[str], dict[str, np.ndarray]]


@pytest.fixture
def golden() -> Golden:
    """Loader of testdata/golden: `golden("perm")["fc1_src_768"]`."""
    return lambda name: {path.stem: np.load(path) for path in (GOLDEN / name).glob("*.npy")}


@pytest.fixture(scope="session")
def layer() -> Layer:
    """One layer of random prepared bytes at full size (2.1 GB), shared by the whole session."""
    return Layer(*fill_random_prepared(1))
