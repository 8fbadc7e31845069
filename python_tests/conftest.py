from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_calls import GPU, Layer

from cake import check
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


@pytest.fixture(scope="session")
def cpu_layer(layer: Layer) -> check.Layer:
    """The same tensors as `cake.check` takes them."""
    return check.Layer(layer.weights, layer.scales)


@pytest.fixture(scope="module")
def gpu_layer(cpu_layer: check.Layer) -> Iterator[check.Layer]:
    """A copy on the GPU."""
    yield cpu_layer.to(GPU)
    torch.cuda.empty_cache()
