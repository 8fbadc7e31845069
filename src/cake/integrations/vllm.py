"""vLLM's NVFP4 SiTU experts run by this package: a plug-in of the group `vllm.general_plugins`.

vLLM calls :func:`register` in each of its processes; the environment decides what comes of it::

    CAKE_EXPERTS=1 vllm serve MODEL --tensor-parallel-size 8
"""

from __future__ import annotations

from typing import Final

from cake.integrations.serving import require_version, switched_on

VERSIONS: Final = ("0.32", "0.34")


def register() -> None:
    """Give vLLM's ModelOpt NVFP4 quantization the experts of this package, if asked to.

    Without `CAKE_EXPERTS=1` nothing is imported or changed. With it, NVFP4 experts with SiTU run on
    cake, or are refused, with the reasons, when the model is made; every other layer is vLLM's as
    before. May be called again.

    Raises
    ------
    ValueError
        `CAKE_EXPERTS` is neither 0 nor 1.
    UnsupportedError
        This vLLM is too old or too new; says what to install.
    """
    if switched_on():
        require_version("vllm", *VERSIONS)
        from cake.integrations import vllm_method  # imports vLLM's layers

        vllm_method.install()
