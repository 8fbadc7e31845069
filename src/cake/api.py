"""The public functions, with the names and order of FlashInfer's `fused_moe`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from cake import errors, log, options, support, workspace
from cake.config import ActivationType

WEIGHT_LAYOUT: Final = "trtllm_shuffled_nvfp4_group16"
_UNSET: Final = object()


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[Tensor],
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    input_sf: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool | None = None,
    profile_ids: Any = None,
    workspace_buffer: Tensor | None = None,
    *,
    clamped_relu2_limit: Any = None,
    situ_beta: Tensor | None = None,
    situ_linear_beta: Tensor | None = None,
    backend: str = "cake",
    nvfp4_4over6: Any = _UNSET,
    batch_invariant: bool = False,
) -> Tensor:
    """Run the routed experts of Kimi-K3 (SiTU, NVFP4) on one tensor-parallel rank.

    Quantizes the tokens to NVFP4, routes them, and computes FC1, SiTU, requantization, FC2 and the
    weighted sum over the experts of each token. The mathematics is `docs/design.md`; its readable
    form `cake.testing.reference.fused_moe_reference`. Sizes: T tokens (0 to 16384), H = 3584,
    I = 384, E = 896, k = 16. All tensors are on one device and contiguous unless said
    otherwise; on a GPU, `output` and the four weight tensors begin at a multiple of 16 bytes.

    Parameters
    ----------
    input : torch.Tensor
        bfloat16 [T, H]; rows may be strided, the last dimension must be contiguous.
    token_selected_experts : torch.Tensor
        int32 or int64 [T, k]. An id outside [0, 896) is an empty slot, which adds nothing.
    token_final_scales : torch.Tensor
        bfloat16 or float32 [T, k]; float32 is rounded to bfloat16. Used as given.
    fc1_expert_weights : torch.Tensor
        uint8 [E, 2I, H/2], prepared ([up; gate] rows interleaved and shuffled); see
        `cake.weights.prepare_weights`.
    fc2_expert_weights : torch.Tensor
        uint8 [E, H, I/2], prepared.
    output_dtype : torch.dtype
        torch.bfloat16.
    quant_scales : sequence of six torch.Tensor
        qX float32 [1]; FC1 block scales uint8 or float8_e4m3fn [E, 2I, H/16], prepared; dX*dW13
        float32 [E]; qA float32 [E]; FC2 block scales [E, H, I/16], prepared; dA*dW2 float32 [E].
    output : torch.Tensor, optional
        bfloat16 [T, H]; every element is written. Allocated when None.
    tp_size, tp_rank : int
        8, and 0 to 7. The output is this rank's part; the sum over ranks is the caller's.
    workspace_buffer : torch.Tensor
        Prepared by `cake_fused_moe_prepare_workspace` for exactly T tokens. Not shared by calls
        that run at the same time.
    activation_type : ActivationType
        ActivationType.Situ.
    situ_beta, situ_linear_beta : torch.Tensor, optional
        float32 [E] gate and linear smoothing; None: the workspace's prepared 4 and 25. With both
        given, no byte of the workspace needs to survive between calls.
    batch_invariant : bool
        On a GPU, one arithmetic at every token count: a token's output row has the same bits at T =
        1 and T = 16384. Without it that holds on sm_90 within T = 1 .. 128 and within 129 .. 16384,
        on sm_100 always; its price on sm_90 is in `docs/performance.md`. The environment variable
        CAKE_BATCH_INVARIANT=1, read at the first call, turns it on for all calls. cake's own
        argument; FlashInfer has none.
    enable_pdl, use_fused_finalize : bool, optional
        None or True.
    backend : str
        "cake". Another backend is FlashInfer's and is called there, with all arguments unchanged.
    tune_max_num_tokens, swizzled_input_sf
        Accepted, without effect: there is no tuning at run time and no quantized input.
    fc1_expert_biases, fc2_expert_biases, input_sf, swiglu_alpha, swiglu_beta, swiglu_limit, \
    ep_size, ep_rank, cluster_size, cluster_rank, enable_alltoall, use_deepseek_fp8_block_scale, \
    use_w4_group_scaling, use_mxfp8_act_scaling, min_latency_mode, use_packed_weights, \
    use_wfp4afp8_humming, profile_ids, clamped_relu2_limit, nvfp4_4over6
        Only the default.

    Returns
    -------
    torch.Tensor
        `output`, or the new tensor.

    Raises
    ------
    ValueError
        A wrong value, shape, stride, device, overlap, or a missing or unprepared workspace. Names
        the argument; nothing has been written.
    DTypeError
        A wrong type or dtype (a TypeError and a ValueError).
    UnsupportedError
        An option or device that cake does not do (a NotImplementedError and a ValueError).

    Notes
    -----
    Runs on the current stream, allocates nothing besides `output=None`, never reads routing values
    on the host and may be captured in a CUDA graph or compiled (`fullgraph=True`). For inference:
    no gradient flows through it. A compile backend that clones mutated arguments (`aot_eager`)
    passes a clone of the workspace, which does not count as prepared and is refused.
    """
    if backend != "cake":
        result: Tensor = options.call_flashinfer(cutlass_fused_moe, dict(locals()))
        return result
    options.refuse_unsupported(
        activation_type=activation_type,
        output_dtype=output_dtype,
        tp_size=tp_size,
        tp_rank=tp_rank,
        ep_size=ep_size,
        ep_rank=ep_rank,
        use_fused_finalize=use_fused_finalize,
        absent=(
            ("fc1_expert_biases", fc1_expert_biases),
            ("fc2_expert_biases", fc2_expert_biases),
            ("input_sf", input_sf),
            ("swiglu_alpha", swiglu_alpha),
            ("swiglu_beta", swiglu_beta),
            ("swiglu_limit", swiglu_limit),
            ("profile_ids", profile_ids),
            ("clamped_relu2_limit", clamped_relu2_limit),
        ),
        switches=(
            ("enable_alltoall", enable_alltoall),
            ("use_deepseek_fp8_block_scale", use_deepseek_fp8_block_scale),
            ("use_w4_group_scaling", use_w4_group_scaling),
            ("use_mxfp8_act_scaling", use_mxfp8_act_scaling),
            ("min_latency_mode", min_latency_mode),
            ("use_packed_weights", use_packed_weights),
            ("use_wfp4afp8_humming", use_wfp4afp8_humming),
            ("nvfp4_4over6", None if nvfp4_4over6 is _UNSET else nvfp4_4over6),
        ),
    )
    if cluster_size != 1 or cluster_rank != 0:
        raise errors.UnsupportedError(
            f"cluster_size: expected cluster_size=1 and cluster_rank=0, got "
            f"cluster_size={cluster_size!r}, cluster_rank={cluster_rank!r}"
        )
    if enable_pdl is not None and not enable_pdl:
        raise errors.UnsupportedError(
            "enable_pdl: expected None or True (every stage uses programmatic dependent launch), "
            "got False"
        )
    options.check_scales(quant_scales)
    tensors = (
        input,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc2_expert_weights,
        *quant_scales,
    )
    optional = (situ_beta, situ_linear_beta, output, workspace_buffer)
    # The operator checks the rest; what it would not see is a meta tensor among others.
    if not options.are_plain_tensors(tensors, optional):
        options.check_tensors(tensors, optional)
    if output is not None and output.requires_grad:
        raise ValueError("output: expected a tensor that requires no gradient, got one that does")
    if workspace_buffer is None:
        if input.dim() == 2 and input.shape[0] != 0:
            raise ValueError(
                "workspace_buffer: expected a prepared buffer, got None; allocate one of "
                "cutlass_fused_moe_workspace_size(...) bytes and prepare it with "
                "cake_fused_moe_prepare_workspace"
            )
        workspace_buffer = input.new_empty(0, dtype=torch.uint8)  # T = 0 needs none
    if output is None:
        output = input.new_empty(input.shape, dtype=torch.bfloat16)
    arguments = (*tensors, situ_beta, situ_linear_beta, output, workspace_buffer, batch_invariant)
    if torch.compiler.is_compiling():
        torch.ops.cake.fused_moe(*arguments)
        return output
    workspace.check_owner(workspace_buffer)
    operator = log.fused_moe if log.is_watched() else torch.ops.cake.fused_moe
    try:
        operator(*arguments)
    except RuntimeError as error:
        options.check_tensors(tensors, optional)
        options.check_dtypes(tensors, optional)
        if not isinstance(batch_invariant, (bool, int)):
            raise errors.DTypeError(
                f"batch_invariant: expected a bool, got {batch_invariant!r}"
            ) from None
        raise errors.translate(error) from None
    # What autograd sees of an in-place write, which the operator itself cannot announce.
    torch.autograd.graph.increment_version((output, workspace_buffer))
    return output


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    activation_type: int = ActivationType.Swiglu,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool | None = None,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    device: torch.device | str | int | None = None,
    backend: str = "cake",
) -> int:
    """Return the bytes of workspace for up to `max_num_tokens` tokens.

    Host arithmetic only; no device is touched. Non-decreasing in `max_num_tokens`: a buffer of this
    size can be prepared for every smaller token count.

    Parameters
    ----------
    max_num_tokens : int
        0 to 16384.
    hidden_size, intermediate_size, num_experts_total, top_k : int
        3584, 384 (of one TP8 rank), 896, 16.
    x_dtype, weight_dtype, output_dtype : torch.dtype
        bfloat16, uint8 (packed NVFP4), bfloat16.
    device
        Accepted; the size is the same on every device.
    activation_type, tp_size, tp_rank, ep_size, ep_rank, min_latency_mode, \
    use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling, \
    use_fused_finalize, use_packed_weights, use_wfp4afp8_humming, backend
        As in `cutlass_fused_moe`.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        A value outside its range; names the argument and the allowed value.
    DTypeError
        A wrong dtype, or a token count that is not an integer.
    UnsupportedError
        An option that cake does not do.
    """
    if backend != "cake":
        return int(options.call_flashinfer(cutlass_fused_moe_workspace_size, dict(locals())))
    options.refuse_unsupported(
        activation_type=activation_type,
        output_dtype=output_dtype,
        tp_size=tp_size,
        tp_rank=tp_rank,
        ep_size=ep_size,
        ep_rank=ep_rank,
        use_fused_finalize=use_fused_finalize,
        absent=(),
        switches=(
            ("min_latency_mode", min_latency_mode),
            ("use_deepseek_fp8_block_scale", use_deepseek_fp8_block_scale),
            ("use_w4_group_scaling", use_w4_group_scaling),
            ("use_mxfp8_act_scaling", use_mxfp8_act_scaling),
            ("use_packed_weights", use_packed_weights),
            ("use_wfp4afp8_humming", use_wfp4afp8_humming),
        ),
    )
    for name, size, expected in (
        ("hidden_size", hidden_size, support.KIMI_K3.hidden),
        ("intermediate_size", intermediate_size, support.KIMI_K3.intermediate),
        ("num_experts_total", num_experts_total, support.KIMI_K3.num_experts),
        ("top_k", top_k, support.KIMI_K3.top_k),
    ):
        if size != expected:
            raise errors.UnsupportedError(f"{name}: expected {name}={expected}, got {size!r}")
    for name, dtype, wanted in (
        ("x_dtype", x_dtype, torch.bfloat16),
        ("weight_dtype", weight_dtype, torch.uint8),
    ):
        if dtype is not wanted:
            raise errors.DTypeError(f"{name}: expected {wanted}, got {dtype!r}")
    count = workspace.token_count("max_num_tokens", max_num_tokens)
    return int(torch.ops.cake.workspace_size(count))


def cake_fused_moe_prepare_workspace(
    workspace_buffer: Tensor,
    num_tokens: int | Iterable[int],
    *,
    backend: str = "cake",
    weight_layout: str = WEIGHT_LAYOUT,
) -> Tensor:
    """Make a caller-owned buffer ready for calls with `num_tokens` tokens.

    Writes the default SiTU constants, loads what a call needs, and remembers that this buffer is
    prepared for this token count. Call it once for every token count before its first call, on the
    stream that will run the calls (or ordered before them), outside graph capture. Idempotent;
    allocates no tensor storage.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        uint8 or int8, one-dimensional, contiguous, of at least
        `cutlass_fused_moe_workspace_size(num_tokens, ...)` bytes, on the device that will run;
        aligned to 128 bytes (64 on the CPU), as torch's allocators give it. A buffer of the
        maximum size can be prepared for every smaller count as well.
    num_tokens : int or iterable of int
        0 to 16384; an iterable such as `range(1, 257)` prepares each.
    backend, weight_layout : str
        "cake" and "trtllm_shuffled_nvfp4_group16".

    Returns
    -------
    torch.Tensor
        `workspace_buffer`.

    Raises
    ------
    ValueError
        Too small (says the bytes needed), misaligned, not contiguous, wrong count or layout.
    DTypeError
        Not a tensor, wrong dtype, or a count that is not an integer.
    RuntimeError
        Called while the stream is capturing a graph.

    Notes
    -----
    A clone, a moved or a resized buffer, and another buffer that got the address of a freed one, do
    not count as prepared.
    """
    if backend != "cake":
        raise errors.UnsupportedError(
            f"backend: unsupported fused MoE backend {backend!r}: only backend='cake' has "
            "workspaces to prepare"
        )
    if weight_layout != WEIGHT_LAYOUT:
        raise errors.UnsupportedError(
            f"weight_layout: expected {WEIGHT_LAYOUT!r}, got {weight_layout!r}"
        )
    options.check_tensor("workspace_buffer", workspace_buffer)
    workspace.prepare(workspace_buffer, num_tokens)
    return workspace_buffer


cutlass_fused_moe_prepare_workspace = cake_fused_moe_prepare_workspace
