"""SGLang's NVFP4 SiTU experts run by this package: a plug-in of the group `sglang.srt.plugins`.

SGLang calls :func:`register` in each of its processes; the environment decides what comes of it::

    CAKE_EXPERTS=1 sglang serve --model-path MODEL --tp 8
"""

from __future__ import annotations

from typing import Final

from cake.integrations.serving import require_version, switched_on

VERSIONS: Final = ("0.5.23", "0.5.24")


def register() -> None:
    """Give SGLang's ModelOpt NVFP4 quantization the experts of this package, if asked to.

    Without `CAKE_EXPERTS=1` nothing is imported or changed. With it, NVFP4 experts with SiTU run on
    cake, or are refused, with the reasons, when the model is made; every other layer is SGLang's as
    before. May be called again.

    Raises
    ------
    ValueError
        `CAKE_EXPERTS` is neither 0 nor 1.
    UnsupportedError
        This SGLang is too old or too new; says what to install. SGLang logs what a plug-in raises
        and goes on without it.
    """
    if switched_on():
        require_version("sglang", *VERSIONS)
        from cake.integrations import sglang_method  # imports SGLang's layers

        sglang_method.install()
