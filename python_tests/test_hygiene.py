"""An installed cake needs torch alone: no compiler, network, home or child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from layer_calls import NEEDS_GPU

import cake

# One token through a layer of zeros, whose pages the CPU never touches. torch comes first for what
# torch itself does; from then on cake may open nothing for writing and start nothing.
SCRIPT = """if True:
    import os, sys
    device, torch_first = sys.argv[1], sys.argv[2] == "torch first"
    seen = []

    def watch(event, arguments):
        if event == "open" and isinstance(arguments[0], str):
            write = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if not write or arguments[0].startswith("/dev/"):
                return
        elif not event.startswith(("subprocess.", "os.system", "os.exec", "os.posix_spawn",
                                   "os.fork", "os.mkdir", "os.rename", "socket.")):
            return
        seen.append((event, *map(str, arguments[:1])))

    if torch_first:
        import torch
        sys.addaudithook(watch)
    import cake
    import torch
    if not torch_first:
        sys.addaudithook(watch)
    from cake.api import cake_fused_moe_prepare_workspace, cutlass_fused_moe
    from cake.weights import PreparedWeights
    tensors = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in PreparedWeights.empty(896, 3584, 384, "meta").tensors().items()
    }
    weights = PreparedWeights(**{**tensors, "w13_scale": torch.ones(896, device=device),
                                 "w2_scale": torch.ones(896, device=device)})
    x = torch.ones(1, 3584, dtype=torch.bfloat16, device=device)
    ids = torch.arange(16, dtype=torch.int32, device=device)[None]
    size = torch.ops.cake.workspace_size(1)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    cake_fused_moe_prepare_workspace(workspace, 1)
    output = torch.full_like(x, 7)
    cutlass_fused_moe(
        x, ids, torch.ones(1, 16, dtype=torch.bfloat16, device=device), weights.w13, weights.w2,
        torch.bfloat16, weights.quant_scales(1.0, 1.0),
        activation_type=cake.ActivationType.Situ, tp_size=8, workspace_buffer=workspace,
        output=output,
    )
    assert not output.any()
    assert device != "cpu" or not torch.cuda.is_initialized()
    print(seen)
"""


@pytest.mark.parametrize("order", ["torch first", "cake first"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_call_needs_nothing_but_torch(tmp_path: Path, device: str, order: str) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    kept = {k: v for k in ("LD_LIBRARY_PATH", "CAKE_LIBRARY") if (v := os.environ.get(k))}
    environment = {
        **kept,
        "HOME": str(home),
        "PATH": str(home),  # no nvcc, no compiler, no shell
        "PYTHONPATH": str(Path(cake.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, device, order],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"
    # CUDA's driver makes its cache of compiled kernels when it starts; nothing may be in there.
    cache = {home / ".nv", home / ".nv/ComputeCache"} if device == "cuda" else set()
    assert set(tmp_path.rglob("*")) - cache == {home}
