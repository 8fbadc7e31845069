"""The routed experts as a module: weights that can be refitted, workspaces that layers share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from cake import api, errors, options, support
from cake.config import ActivationType
from cake.modelopt import ModelOptLayer
from cake.prepared_weights import PreparedWeights, check_expert, check_tensor
from cake.workspace import token_counts as workspace_counts

_SCALES = ("input_scale", "w13_sf", "fc1_alpha", "fc2_input_scale", "w2_sf", "fc2_alpha")


class SharedWorkspace:
    """One workspace, prepared for several token counts, for layers that run one after another.

    `buffer` (uint8 [bytes]) stays the same, for captured graphs hold its address; `token_counts` is
    the frozenset of what it is prepared for. A workspace is no part of a module's state: it cannot
    be pickled, and its deep copy is another buffer, prepared alike.

    Parameters
    ----------
    token_counts : int or iterable of int
        0 to 16384 each, such as the batch sizes of captured graphs; the largest sets the size.
    device : torch.device, str or int, optional
        Where the layers run; default: torch's default device.

    Raises
    ------
    ValueError
        No or a wrong token count, or an unsupported device; also a TypeError for no integer.
    """

    def __init__(
        self, token_counts: int | Iterable[int], device: torch.device | str | int | None = None
    ) -> None:
        from torch._dynamo import mark_static_address  # takes a second, which `import cake` saves

        counts = workspace_counts("token_counts", token_counts)
        if not counts:
            raise ValueError("token_counts: expected at least one, got none")
        if device is not None and str(device) != "meta":
            supported, reason = support.is_supported(device)
            if not supported:
                raise ValueError(reason)
        nbytes = torch.ops.cake.workspace_size(max(counts))
        with torch.inference_mode(False):  # either mode may write the buffer
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            api.cake_fused_moe_prepare_workspace(self.buffer, counts)
        # Like a buffer of a module: torch.compile makes no CUDA graphs that write other inputs.
        mark_static_address(self.buffer)
        self.token_counts = frozenset(counts)

    def prepare(self, token_counts: int | Iterable[int]) -> None:
        """Prepare for more token counts, outside of a capture; the buffer must have room."""
        counts = workspace_counts("token_counts", token_counts)
        if not counts:
            return
        most = max(counts)
        if torch.ops.cake.workspace_size(most) > self.buffer.numel():
            raise ValueError(
                f"token_counts: expected at most {max(self.token_counts)}, the largest that this "
                f"workspace was made for, got {most}; make one with {most} among its token_counts"
            )
        api.cake_fused_moe_prepare_workspace(self.buffer, counts)
        self.token_counts |= frozenset(counts)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedWorkspace:
        return SharedWorkspace(self.token_counts, self.buffer.device)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("SharedWorkspace: cannot be pickled; save the state_dict of the module")

    def __repr__(self) -> str:
        return f"SharedWorkspace({sorted(self.token_counts)}, device='{self.buffer.device}')"


class SiTUExperts(nn.Module):
    """The routed experts of one layer on one tensor-parallel rank, with a workspace to run in.

    All tensors are persistent buffers, not parameters: no gradient flows. Codes and block scales
    are the given tensors, float32 scales are copies. Casts (`half()`, `to(dtype)`) change none;
    `type(dtype)`, which would convert codes, is refused. `load_state_dict` writes in place, as
    `refit` does, and refuses a part of a state and another `layout_version`, dtype or shape.

    `to(device)` makes a new workspace there, prepared for the same counts; one that was passed in
    stays, until `use_workspace` replaces it. `copy.deepcopy` makes a new one in any case, and one
    for all copied layers that share one.

    Parameters
    ----------
    weights : PreparedWeights
        E experts, on the device that will run, or on meta, to be loaded with `assign=True`.
    quant_scales : sequence of six torch.Tensor
        As in `cutlass_fused_moe`, on that device; the block scales are the tensors of `weights`.
    token_counts : int or iterable of int
        The token counts that will come; the workspace is prepared for them.
    workspace : SharedWorkspace, optional
        Default: the module makes its own, as large as `token_counts` needs.
    on_new_count : {"refuse", "prepare"}
        `forward` with another token count: an error, or preparation on the spot, which needs room
        in the workspace and fails in a capture. Compiled calls always refuse.
    batch_invariant : bool
        As in `cutlass_fused_moe`.
    situ_beta, situ_linear_beta : torch.Tensor, optional
        float32 [E]. With both, no byte of the workspace needs to survive between calls.

    Raises
    ------
    ValueError
        A wrong argument, named; also a TypeError for a wrong dtype.
    """

    w13: Tensor
    w2: Tensor
    situ_beta: Tensor | None
    situ_linear_beta: Tensor | None

    def __init__(
        self,
        weights: PreparedWeights,
        quant_scales: Sequence[Tensor],
        *,
        token_counts: int | Iterable[int] = (),
        workspace: SharedWorkspace | None = None,
        on_new_count: Literal["refuse", "prepare"] = "refuse",
        batch_invariant: bool = False,
        situ_beta: Tensor | None = None,
        situ_linear_beta: Tensor | None = None,
    ) -> None:
        super().__init__()
        if on_new_count not in ("refuse", "prepare"):
            raise ValueError(f"on_new_count: expected 'refuse' or 'prepare', got {on_new_count!r}")
        self.on_new_count, self.batch_invariant = on_new_count, batch_invariant
        for name, buffer in _buffers(weights, quant_scales).items():
            self.register_buffer(name, buffer)
        version = torch.tensor(weights.LAYOUT_VERSION, device=weights.device)
        self.register_buffer("layout_version", version)
        for name, beta in (("situ_beta", situ_beta), ("situ_linear_beta", situ_linear_beta)):
            if beta is not None:
                beta = _scale(name, beta, weights.num_experts, weights.w13)
            self.register_buffer(name, beta)
        self._owns_workspace = workspace is None
        if workspace is None:
            self.workspace = SharedWorkspace(token_counts, weights.device)
        else:
            self.use_workspace(workspace)
            self.prepare(token_counts)

    @classmethod
    def from_prepared(
        cls, weights: PreparedWeights, quant_scales: Sequence[Tensor], **options: Any
    ) -> SiTUExperts:
        """Make a module of prepared weights; `options` are the constructor's."""
        return cls(weights, quant_scales, **options)

    @classmethod
    def from_modelopt(cls, layer: ModelOptLayer, **options: Any) -> SiTUExperts:
        """Make a module of a layer of `cake.modelopt`; `options` are the constructor's."""
        return cls(layer.weights, layer.quant_scales, **options)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        expected_tp_rank: int | None = None,
        **options: Any,
    ) -> SiTUExperts:
        """Load a layer by `cake.checkpoint.load_layer`; `options` are the constructor's."""
        from cake.checkpoint import load_layer

        layer = load_layer(path, device=device, expected_tp_rank=expected_tp_rank)
        return cls.from_modelopt(layer, **options)

    @property
    def weights(self) -> PreparedWeights:
        """The prepared weights; the tensors are the buffers."""
        return PreparedWeights(*(getattr(self, name) for name in PreparedWeights.__slots__))

    @property
    def quant_scales(self) -> list[Tensor]:
        """The six scales; the tensors are the buffers."""
        return [getattr(self, name) for name in _SCALES]

    def use_workspace(self, workspace: SharedWorkspace) -> None:
        """Run in this workspace from now on. A graph captured before needs the old one alive."""
        device = self.w13.device
        if not isinstance(workspace, SharedWorkspace) or workspace.buffer.device != device:
            raise ValueError(f"workspace: expected a SharedWorkspace on {device}, got {workspace}")
        self.workspace, self._owns_workspace = workspace, False

    def prepare(self, token_counts: int | Iterable[int]) -> None:
        """Prepare the workspace for more token counts, see `SharedWorkspace.prepare`."""
        self._follow_weights()
        self.workspace.prepare(token_counts)

    def forward(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Run the experts by `cutlass_fused_moe`, whose names of the arguments errors use.

        Runs on the current stream, allocates nothing but the output, may be captured in a CUDA
        graph and compiled (`fullgraph=True`; with `dynamic=True` the token counts share a graph).

        Parameters
        ----------
        x : torch.Tensor
            `input`, bfloat16 [T, H]. T = 0 needs no preparation.
        topk_ids, topk_weights : torch.Tensor
            `token_selected_experts` and `token_final_scales`, int32 or int64 [T, k] and bfloat16 or
            float32 [T, k].
        out : torch.Tensor, optional
            `output`, bfloat16 [T, H], written whole and returned. Allocated when None.

        Raises
        ------
        ValueError
            T is not prepared, the workspace is elsewhere, or what `cutlass_fused_moe` refuses. From
            a compiled call it is a RuntimeError.
        """
        if not torch.compiler.is_compiling():  # a traced look-up would compile every T anew
            self._follow_weights()
            tokens = x.shape[0] if isinstance(x, Tensor) and x.dim() == 2 else 0
            counts = self.workspace.token_counts
            if tokens != 0 and tokens not in counts:
                if self.on_new_count != "prepare":
                    raise ValueError(
                        f"x: expected a prepared token count, one of {sorted(counts)}, got "
                        f"{tokens}; add it, outside of a capture, by module.prepare([{tokens}])"
                    )
                self.workspace.prepare([tokens])
        # By name: a look-up by attribute costs the host half a microsecond each.
        buffers: dict[str, Any] = self._buffers
        return api.cutlass_fused_moe(
            x,
            topk_ids,
            topk_weights,
            buffers["w13"],
            buffers["w2"],
            torch.bfloat16,
            [buffers[name] for name in _SCALES],
            tp_size=support.TP_SIZE,
            output=out,
            activation_type=ActivationType.Situ,
            workspace_buffer=self.workspace.buffer,
            situ_beta=buffers["situ_beta"],
            situ_linear_beta=buffers["situ_linear_beta"],
            batch_invariant=self.batch_invariant,
        )

    def refit(
        self, weights: PreparedWeights, quant_scales: Sequence[Tensor], expert: int | None = None
    ) -> None:
        """Copy new weights and scales into the buffers, where captured graphs read them.

        Copies on the current stream, after all is checked: a refused refit has written nothing.

        Parameters
        ----------
        weights : PreparedWeights
            Of all experts or, with `expert`, of that one alone (E = 1); on any device.
        quant_scales : sequence of six torch.Tensor
            The scales of `weights`, as in the constructor.
        expert : int, optional
            0 .. E-1: write this one alone. `quant_scales[0]`, which the experts share, must then
            be what it was; to compare it waits for the device.

        Raises
        ------
        ValueError
            A wrong argument, named; also a TypeError for a wrong dtype.
        """
        new = _buffers(weights, quant_scales)
        targets = {name: getattr(self, name) for name in new}
        if expert is not None:
            check_expert(self.weights, expert)
            old, given = targets.pop("input_scale").item(), new["input_scale"].item()
            if given != old:
                raise ValueError(
                    f"quant_scales[0]: expected {old}, which the experts share, got {given}; refit "
                    "all experts to change it"
                )
            targets = {name: tensor[expert : expert + 1] for name, tensor in targets.items()}
        for name, target in targets.items():
            check_tensor(name, new[name], target.dtype, tuple(target.shape))
        with torch.inference_mode():  # buffers that were made in this mode are written in no other
            for name, target in targets.items():
                target.copy_(new[name])

    def _follow_weights(self) -> None:
        """Replace the module's own workspace if the weights moved; refuse another's elsewhere."""
        device = self.w13.device
        if self.workspace.buffer.device != device:
            if not self._owns_workspace:
                self.use_workspace(self.workspace)  # refuses it
            self.workspace = SharedWorkspace(self.workspace.token_counts, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SiTUExperts:
        def keep_dtype(tensor: Tensor) -> Tensor:
            # Casts apply to floating-point tensors: as bytes, the scales are none.
            data = tensor.view(torch.uint8) if tensor.is_floating_point() else tensor
            result = fn(data)
            if result.dtype != data.dtype:
                raise errors.DTypeError(f"dtype: codes cannot be converted, got {result.dtype}")
            return tensor if result is data else result.view(tensor.dtype)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        # Now, not in the next call, which may be captured or compiled.
        if self._owns_workspace and support.is_supported(self.w13.device)[0]:
            self._follow_weights()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Whole or not at all, where torch would convert other dtypes and load the tensors that fit.
        buffers = dict(self.named_buffers(prefix.removesuffix("."), recurse=False))
        problems = []
        for name, buffer in buffers.items():
            new = state_dict.get(name)
            if new is None:
                problems.append(f"{name}: missing")
            elif (new.dtype, new.shape) != (buffer.dtype, buffer.shape):
                expected, got = (f"{t.dtype} {list(t.shape)}" for t in (buffer, new))
                problems.append(f"{name}: expected {expected}, got {got}")
            elif name == f"{prefix}layout_version" and not new.is_meta:
                expected, got = str(PreparedWeights.LAYOUT_VERSION), str(int(new))
                if got != expected:
                    problems.append(f"{name}: expected {expected}, got {got}; prepare anew")
        if problems and not buffers.keys().isdisjoint(state_dict):
            args[-1].extend(problems)  # the messages of load_state_dict
        else:
            super()._load_from_state_dict(state_dict, prefix, *args)


def _buffers(weights: PreparedWeights, quant_scales: Sequence[Tensor]) -> dict[str, Tensor]:
    """Check the arguments, and give their tensors by the names of the buffers."""
    if not isinstance(weights, PreparedWeights):
        raise errors.DTypeError(f"weights: expected PreparedWeights, got {type(weights).__name__}")
    options.check_scales(quant_scales)
    tensors = weights.tensors()
    for i, (name, scale) in enumerate(zip(_SCALES, quant_scales, strict=True)):
        if name not in tensors:
            count = 1 if name == "input_scale" else weights.num_experts
            tensors[name] = _scale(f"quant_scales[{i}]", scale, count, weights.w13)
        elif (
            not isinstance(scale, Tensor)
            or scale.data_ptr() != tensors[name].data_ptr()
            or scale.nbytes != tensors[name].nbytes
        ):
            raise ValueError(f"quant_scales[{i}]: expected weights.{name}, got another")
    for name in ("w13_scale", "w2_scale"):
        tensors[name] = tensors[name].detach().clone()
    return tensors


def _scale(name: str, scale: Tensor, count: int, like: Tensor) -> Tensor:
    """Check a scale and copy it: where one tensor was given for two, writing both would fail."""
    check_tensor(name, scale, torch.float32, (count,))
    if scale.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {scale.device}")
    return scale.detach().clone(memory_format=torch.contiguous_format)
