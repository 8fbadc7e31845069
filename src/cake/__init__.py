"""cake: the routed experts of Kimi-K3 in NVFP4, as one fused operation.

`cutlass_fused_moe` runs BF16 tokens through the experts that they were routed to; see its
docstring, and `cake info` on the command line for what this machine supports.
"""

from cake import _fake  # noqa: F401  (registers the fake kernels)
from cake._library import build_info
from cake.api import (
    cake_fused_moe_prepare_workspace,
    cutlass_fused_moe,
    cutlass_fused_moe_prepare_workspace,
    cutlass_fused_moe_workspace_size,
)
from cake.config import ActivationType, QuantConfig, QuantFormat, SiTU, TrtllmFp4Config
from cake.errors import DTypeError, UnsupportedError
from cake.module import SharedWorkspace, SiTUExperts
from cake.support import is_supported

__version__: str = build_info()["version"]

__all__ = [
    "ActivationType",
    "DTypeError",
    "QuantConfig",
    "QuantFormat",
    "SharedWorkspace",
    "SiTU",
    "SiTUExperts",
    "TrtllmFp4Config",
    "UnsupportedError",
    "__version__",
    "build_info",
    "cake_fused_moe_prepare_workspace",
    "cutlass_fused_moe",
    "cutlass_fused_moe_prepare_workspace",
    "cutlass_fused_moe_workspace_size",
    "is_supported",
]
