"""One call of the operation, from BF16 weights to BF16 output, on the CPU."""

import torch

import cake
from cake.testing import synthetic

num_tokens, num_experts = 4, 896

# A layer of all experts: 7.4 GB of BF16 weights, made and prepared one expert at a time (2.1 GB).
weights, quant_scales = synthetic.make_layer(seed=0, num_experts=num_experts, progress=True)
x = synthetic.make_tokens(num_tokens, seed=1)
topk_ids, topk_weights = synthetic.route(num_tokens, tokens=x)

nbytes = cake.cutlass_fused_moe_workspace_size(
    num_tokens,
    3584,
    384,
    896,
    16,
    x_dtype=torch.bfloat16,
    weight_dtype=torch.uint8,
    activation_type=cake.ActivationType.Situ,
    tp_size=8,
)
workspace = torch.empty(nbytes, dtype=torch.uint8)
output = torch.empty_like(x)
cake.cake_fused_moe_prepare_workspace(workspace, num_tokens)
cake.cutlass_fused_moe(
    x,
    topk_ids,
    topk_weights,
    weights.w13,
    weights.w2,
    torch.bfloat16,
    quant_scales,
    activation_type=cake.ActivationType.Situ,
    tp_size=8,
    workspace_buffer=workspace,
    output=output,
)
print(f"output {tuple(output.shape)} {output.dtype}, rms {output.float().pow(2).mean().sqrt():.2f}")
