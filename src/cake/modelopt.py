"""Expert tensors of a ModelOpt NVFP4 checkpoint to prepared weights and the op's scales.

Per expert and projection a checkpoint has ``weight`` (uint8 codes), ``weight_scale`` (E4M3 block
scales, linear), ``weight_scale_2`` and ``input_scale``. The last two are DECODE factors,
amax / 2688::

    W = e2m1 * weight_scale * weight_scale_2          x ~= e2m1 * e4m3 * input_scale

Checkpoints of compressed-tensors (``weight_packed``, ``weight_global_scale``) store the reciprocals
of these two; they are refused by name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .errors import UnsupportedError
from .prepared_weights import PreparedWeights, check_tensor, decode_scales
from .quantize import BLOCK, e4m3_decode, e4m3_encode
from .weights import check_block_scales, expert_range, prepare_quantized_expert

Projection = Literal["gate", "up", "down"]

PROJECTIONS: dict[str, Projection] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
KINDS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_NAME = re.compile(rf"(|.*\.)experts\.(\d+)\.({'|'.join(PROJECTIONS)})\.(.+)")

# (expert, projection, kind) -> name in the checkpoint
_Names = dict[tuple[int, Projection, str], str]


@dataclass(frozen=True, slots=True, eq=False)
class ModelOptLayer:
    """One layer on one tensor-parallel rank.

    Attributes
    ----------
    weights : PreparedWeights
        This rank's slice of all experts.
    quant_scales : list of Tensor
        The six scales of the op, see :meth:`PreparedWeights.quant_scales`.
    input_scale : float
        dX, the largest ``input_scale`` of all gate and up projections.
    intermediate_scale : Tensor
        dA, float32 [E]: the largest ``input_scale`` of all down projections, or each its own.
    """

    weights: PreparedWeights
    quant_scales: list[Tensor]
    input_scale: float
    intermediate_scale: Tensor


def prepare_modelopt_layer(
    tensors: Mapping[str, Tensor],
    *,
    tp_rank: int,
    tp_size: int = 8,
    num_experts: int | None = None,
    missing_input_scale: Literal["error", "max"] = "error",
    per_expert_input_scale: bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> ModelOptLayer:
    """Slice, unify and lay out the experts of one layer; no weight code changes.

    Parameters
    ----------
    tensors : Mapping of str to Tensor
        Tensors named ``<prefix>experts.N.<projection>.<kind>`` with one prefix; the projections are
        gate_proj, up_proj, down_proj or w1 (gate), w3 (up), w2 (down). Other names are ignored.
        Each tensor is looked up once, weights expert by expert, so the mapping may read lazily.
        With the full intermediate width F, per expert:

        =================  ==================  ==================  ================
        kind               gate, up            down                dtype
        =================  ==================  ==================  ================
        weight             [F, H/2]            [H, F/2]            uint8
        weight_scale       [F, H/16]           [H, F/16]           float8_e4m3fn
        weight_scale_2     [] or [1]           [] or [1]           float32
        input_scale        [] or [1]           [] or [1]           float32
        =================  ==================  ==================  ================
    tp_rank, tp_size : int
        This rank takes features ``[rank*F/size, (rank+1)*F/size)``.
    num_experts : int, optional
        E, if it should be checked; otherwise taken from the names, which must be 0 .. E-1.
    missing_input_scale : {"error", "max"}
        Calibration leaves out experts that it never routed to. "max" gives them the largest scale
        of the others; "error" refuses.
    per_expert_input_scale : bool
        Keep dA of each expert instead of the largest for all. dX always is one number.
    device : torch.device or str, optional
        Where the result lives; default: where the first weight is.
    progress : bool
        Show a progress bar if ``rich`` is installed and stderr is a terminal.

    Returns
    -------
    ModelOptLayer

    Raises
    ------
    ValueError
        If a tensor is missing or ambiguous, has a wrong shape, or holds a scale that is NaN,
        infinite, negative or (per-tensor scales) zero; also a TypeError for a wrong dtype, a
        NotImplementedError for another quantization format. The message has the tensor's name.

    Warns
    -----
    UserWarning
        If gate and up have different ``weight_scale_2`` and a block scale became zero by it, see
        :func:`unify_gate_up`; or if a ``weight_scale_2`` is above 1, so that it may be a divisor.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank: expected 0 .. {tp_size - 1}, got {tp_rank}")
    if missing_input_scale not in ("error", "max"):
        raise ValueError(
            f"missing_input_scale: expected 'error' or 'max', got {missing_input_scale!r}"
        )
    names = expert_names(tensors)
    experts = _count_experts(names, num_experts)
    dx, da = _activation_scales(tensors, names, experts, missing_input_scale)
    if not per_expert_input_scale:
        da = da.max().expand(experts).clone()
    weight_scale = {
        key: _scalar(tensors, names, key) for key in expert_keys(experts, "weight_scale_2")
    }
    largest = max(weight_scale, key=weight_scale.__getitem__)
    if weight_scale[largest] > 1:  # of weights that reach 2688
        warnings.warn(
            f"{names[largest]}: expected a multiplier, amax / 2688 of the weights, got "
            f"{weight_scale[largest]:g}; a divisor (2688 / amax) must be inverted first",
            stacklevel=2,
        )

    first_name = names[0, "gate", "weight"]
    first = tensors[first_name]
    if first.ndim != 2 or first.shape[0] % tp_size:
        raise ValueError(
            f"{first_name}: expected shape [F, H/2] with F a multiple of tp_size={tp_size}, "
            f"got {tuple(first.shape)}"
        )
    full, hidden = first.shape[0], 2 * first.shape[1]
    part = full // tp_size
    target = first.device if device is None else device
    weights = PreparedWeights.empty(experts, hidden, part, target)
    rows = slice(tp_rank * part, (tp_rank + 1) * part)

    def load(e: int, projection: Projection, kind: str) -> Tensor:
        """Read one tensor, check it and return this rank's slice (block scales as uint8)."""
        name = names[e, projection, kind]
        tensor = first if name == first_name else tensors[name]
        per_byte = 2 if kind == "weight" else BLOCK
        shape = (hidden, full // per_byte) if projection == "down" else (full, hidden // per_byte)
        dtype = torch.uint8 if kind == "weight" else torch.float8_e4m3fn
        check_tensor(name, tensor, dtype, shape)
        if projection == "down":
            width = part // per_byte
            tensor = tensor[:, tp_rank * width : (tp_rank + 1) * width]
        else:
            tensor = tensor[rows]
        if kind == "weight_scale":
            return check_block_scales(name, tensor, tuple(tensor.shape))
        return tensor

    for e in expert_range(experts, progress):
        up, gate = (load(e, projection, "weight") for projection in ("up", "gate"))
        up_sf, gate_sf = (load(e, projection, "weight_scale") for projection in ("up", "gate"))
        pair = torch.tensor(
            [[weight_scale[e, p, "weight_scale_2"] for p in ("up", "gate")]], dtype=torch.float32
        )
        w13_sf, w13_scale = unify_gate_up(torch.cat((up_sf, gate_sf)).unsqueeze(0), pair)
        lost = int(((w13_sf[0] == 0) & (torch.cat((up_sf, gate_sf)) != 0)).sum())
        if lost:
            warnings.warn(
                f"expert {e}: {lost} nonzero block scales became zero because weight_scale_2 of "
                f"gate and up differ ({pair[0, 1].item():g} and {pair[0, 0].item():g})",
                stacklevel=2,
            )
        prepare_quantized_expert(
            weights,
            e,
            torch.cat((up, gate)),
            w13_sf[0],
            load(e, "down", "weight"),
            load(e, "down", "weight_scale"),
            w13_order="up_gate",
            w13_scale=w13_scale,
            w2_scale=weight_scale[e, "down", "weight_scale_2"],
        )
    da = da.to(weights.device)
    return ModelOptLayer(weights, weights.quant_scales(dx, da), dx, da)


def unify_gate_up(w13_sf: Tensor, w13_scale_2: Tensor) -> tuple[Tensor, Tensor]:
    """Give both halves of w13 one decode scale, which the op applies to gate and up alike.

    Where the two differ, the half with the smaller scale s is expressed against the larger one d:
    each of its block scales becomes ``e4m3(sf * s / d)``, rounded once, to nearest even. The values
    of that half move by at most 1/16 of themselves or, where the new block scale is subnormal, by
    the code times 2^-10 * d. A block scale below 2^-10 after this becomes zero; with the codes left
    as they are, and the larger half in need of its range, that cannot be avoided.

    Parameters
    ----------
    w13_sf : Tensor
        uint8 or float8_e4m3fn [E, 2I, C], linear block scales, one half after the other.
    w13_scale_2 : Tensor
        float32 decode scales: [], [1] (one for all), [E], [E, 1] (one per expert) or [E, 2] (one
        per half, in the order of the halves).

    Returns
    -------
    w13_sf : Tensor
        uint8 [E, 2I, C].
    w13_scale : Tensor
        float32 [E], the larger of the two.

    Raises
    ------
    ValueError
        If a shape is none of these or a decode scale is not finite and positive; also a TypeError
        if ``w13_scale_2`` is not float32.
    """
    if w13_sf.ndim != 3 or w13_sf.shape[1] % 2:
        raise ValueError(f"w13_sf: expected shape [E, 2I, C], got {tuple(w13_sf.shape)}")
    experts = w13_sf.shape[0]
    shape = tuple(w13_scale_2.shape)
    if shape not in ((), (1,), (experts,), (experts, 1), (experts, 2)):
        raise ValueError(
            f"w13_scale_2: expected shape [], [1], [E], [E, 1] or [E, 2] with E={experts}, "
            f"got {shape}"
        )
    check_tensor("w13_scale_2", w13_scale_2, torch.float32, shape)
    if shape == (experts, 2):
        pair = decode_scales("w13_scale_2", w13_scale_2, 2 * experts).reshape(experts, 2)
    else:
        pair = decode_scales("w13_scale_2", w13_scale_2, experts).unsqueeze(1).expand(experts, 2)
    common = pair.amax(1)
    sf = w13_sf.view(torch.uint8)
    if bool((pair[:, 0] == pair[:, 1]).all()):
        return sf, common
    # sf * s / d in float64 leaves one rounding that matters, that to E4M3.
    ratio = (pair.double() / common.double().unsqueeze(1)).to(sf.device)
    halves = e4m3_decode(sf).double().reshape(experts, 2, -1, sf.shape[2])
    return e4m3_encode((halves * ratio[:, :, None, None]).reshape(sf.shape)), common


def expert_keys(experts: int, kind: str) -> Iterable[tuple[int, Projection, str]]:
    """Give the keys of one kind of all projections of all experts."""
    projections: tuple[Projection, ...] = ("gate", "up", "down")
    return ((e, projection, kind) for e in range(experts) for projection in projections)


def expert_names(tensors: Iterable[str]) -> _Names:
    """Find the expert tensors of one layer by name."""
    names: _Names = {}
    prefixes: set[str] = set()
    for name in tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        prefix, expert, projection, kind = match.groups()
        if kind not in KINDS:
            raise UnsupportedError(
                f"{name}: expected one of {', '.join(KINDS)} (ModelOpt NVFP4); weight_packed "
                "and *_global_scale are compressed-tensors, whose global scales are reciprocals"
            )
        key = (int(expert), PROJECTIONS[projection], kind)
        if key in names and prefix in prefixes:
            raise ValueError(
                f"{name}: expected one name for this tensor, also got {names[key]}; pass the "
                "tensors of one layer"
            )
        prefixes.add(prefix)
        names[key] = name
    if len(prefixes) > 1:
        raise ValueError(f"tensors: expected the experts of one layer, got {sorted(prefixes)}")
    if not names:
        raise ValueError("tensors: expected names like 'experts.0.gate_proj.weight', got none")
    return names


def _count_experts(names: _Names, num_experts: int | None) -> int:
    """Check that experts are 0 .. E-1 and complete except for input scales; return E."""
    found = {expert for expert, _, _ in names}
    experts = max(found) + 1 if num_experts is None else num_experts
    absent = next((e for e in range(experts) if e not in found), None)
    if absent is not None or len(found) != experts:
        what = f"without {absent}" if absent is not None else f"up to {max(found)}"
        raise ValueError(
            f"tensors: expected experts 0 .. {experts - 1}, got {len(found)} experts {what}"
        )
    for kind in ("weight", "weight_scale", "weight_scale_2"):
        for key in expert_keys(experts, kind):
            if key not in names:
                raise ValueError(
                    f"tensors: expected {kind} of the {key[1]} projection of expert {key[0]}, "
                    "got none"
                )
    return experts


def _scalar(
    tensors: Mapping[str, Tensor], names: _Names, key: tuple[int, Projection, str]
) -> float:
    """Read a per-tensor decode scale."""
    name = names[key]
    tensor = tensors[name]
    if tuple(tensor.shape) not in ((), (1,)):
        raise ValueError(f"{name}: expected shape [] or [1], got {tuple(tensor.shape)}")
    check_tensor(name, tensor, torch.float32, tuple(tensor.shape))
    return float(decode_scales(name, tensor, 1))


def _activation_scales(
    tensors: Mapping[str, Tensor], names: _Names, experts: int, missing: Literal["error", "max"]
) -> tuple[float, Tensor]:
    """Read all input scales: dX, the largest of gate and up, and dA of each expert, float32 [E]."""
    keys = list(expert_keys(experts, "input_scale"))
    absent = [key for key in keys if key not in names]
    if absent and missing == "error":
        expert, projection, _ = absent[0]
        beside = names[expert, projection, "weight"]
        raise ValueError(
            f"input_scale: missing for {len(absent)} of {len(keys)} projections, for example "
            f"{beside.removesuffix('weight')}input_scale; calibration did not reach these experts: "
            "calibrate with more data, or pass missing_input_scale='max' to give them the largest "
            "scale of the others"
        )
    scales = {key: _scalar(tensors, names, key) for key in keys if key in names}
    inputs = [scale for (_, projection, _), scale in scales.items() if projection != "down"]
    downs = {e: scale for (e, projection, _), scale in scales.items() if projection == "down"}
    for what, values in (("gate and up", inputs), ("down", downs)):
        if not values:
            raise ValueError(f"input_scale: expected at least one for {what}, got none")
    largest = max(downs.values())
    return max(inputs), torch.tensor(
        [downs.get(e, largest) for e in range(experts)], dtype=torch.float32
    )
